//! Whether a JPEG file is whole. The decoder fills what is missing with grey.

/// Whether the segments of a JPEG file go on to its end-of-image marker.
pub(crate) fn is_whole(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    const SCAN: u8 = 0xda;
    let mut at = 2;
    while at + 1 < bytes.len() {
        // Fill bytes, and what some cameras leave between segments, are skipped.
        if bytes[at] != 0xff || matches!(bytes[at + 1], 0x00 | 0xff) {
            at += 1;
            continue;
        }
        match bytes[at + 1] {
            END => return true,
            // Markers without a segment: TEM, and the restarts within a scan.
            0x01 | 0xd0..=0xd8 => at += 2,
            marker => {
                let Some(&[high, low]) = bytes[at + 2..].first_chunk() else {
                    return false;
                };
                at += 2 + usize::from(u16::from_be_bytes([high, low])).max(2);
                if marker == SCAN && at >= bytes.len() {
                    return false;
                }
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_with_its_end_marker() {
        // A comment that holds an end marker, a scan with a stuffed byte and a restart, the end.
        let file = [
            0xff, 0xd8, 0xff, 0xfe, 0, 4, 0xff, 0xd9, 0xff, 0xda, 0, 3, 1, 7, 0xff, 0, 0xff, 0xd0,
            9, 0xff, 0xd9,
        ];
        assert!(is_whole(&file));
        for length in 0..file.len() {
            assert!(!is_whole(&file[..length]), "{length}");
        }
    }
}
