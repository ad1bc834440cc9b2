//! The alphabet of byte-level BPE: each byte as one printable character (GPT-2).

/// The byte that a character of the alphabet stands for.
///
/// Printable bytes of Latin-1 stand for themselves; the 68 others, in order, are the
/// characters from U+0100 on.
pub(super) fn byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    /// The alphabet of the tokenizers crate has 256 characters; each byte appears once, the
    /// printable ones as themselves (GPT-2's `bytes_to_unicode`).
    #[test]
    fn the_alphabet_is_a_bijection() {
        let alphabet = ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.iter().filter_map(|&c| byte(c)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let outside = (0..0x3000)
            .filter_map(char::from_u32)
            .filter(|c| !alphabet.contains(c));
        assert!(outside.into_iter().all(|c| byte(c).is_none()));
        assert_eq!(byte('Ġ'), Some(b' '));
        assert_eq!(byte('Ċ'), Some(b'\n'));
    }
}
