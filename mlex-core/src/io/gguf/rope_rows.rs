//! The order of the rows of query and key projections.

use crate::{Error, Result};

/// Puts the rows of a query or key projection from the order of llama GGUF files into that of the
/// checkpoint they were made from.
///
/// Converters to GGUF permute these rows for models whose rotary embedding ggml computes on
/// adjacent pairs: within each head, rows `i` and `i + head_dim / 2` become `2i` and `2i + 1`.
/// Here they go back.
///
/// `data` is row-major and has `rows` rows of any length and any element, so the packed elements,
/// the scales and the biases of a quantized projection each take one call; so does a bias vector,
/// with rows of one element.
///
/// # Errors
/// Fails where `head_dim` is 0 or odd, where `rows` is not a multiple of it, and where `data` is
/// not `rows` rows of one length.
pub fn unpermute_rope_rows<T: Copy>(data: &mut [T], rows: usize, head_dim: usize) -> Result<()> {
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(Error::format(
            "head_dim",
            "an even number",
            head_dim.to_string(),
        ));
    }
    if !rows.is_multiple_of(head_dim) {
        let expected = format!("a multiple of the head_dim {head_dim}");
        return Err(Error::format("rows", expected, rows.to_string()));
    }
    if data.is_empty() {
        return Ok(());
    }
    if rows == 0 || !data.len().is_multiple_of(rows) {
        let found = format!("{} elements", data.len());
        return Err(Error::format(
            "rows",
            format!("{rows} rows of one length"),
            found,
        ));
    }
    let row_len = data.len() / rows;
    let mut head = Vec::with_capacity(head_dim * row_len);
    for stored in data.chunks_exact_mut(head_dim * row_len) {
        head.clear();
        for half in 0..2 {
            for pair in stored.chunks_exact(2 * row_len) {
                head.extend_from_slice(&pair[half * row_len..][..row_len]);
            }
        }
        stored.copy_from_slice(&head);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The permutation of llama.cpp's convert_hf_to_gguf.py (`LlamaModel.permute`): reshape to
    /// (heads, 2, head_dim / 2, row), swap axes 1 and 2.
    fn permute<T: Copy>(data: &[T], rows: usize, head_dim: usize) -> Vec<T> {
        let row_len = data.len() / rows;
        let mut out = Vec::new();
        for head in 0..rows / head_dim {
            for i in 0..head_dim / 2 {
                for half in 0..2 {
                    let row = head * head_dim + half * head_dim / 2 + i;
                    out.extend_from_slice(&data[row * row_len..][..row_len]);
                }
            }
        }
        out
    }

    #[test]
    fn adjacent_pairs_become_halves() {
        let mut rows = ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b"];
        unpermute_rope_rows(&mut rows, 8, 4).unwrap();
        assert_eq!(rows, ["0a", "1a", "0b", "1b", "2a", "3a", "2b", "3b"]);
    }

    #[test]
    fn undoes_the_permutation_of_the_converter() {
        for (heads, head_dim, row_len) in [(1, 2, 1), (3, 8, 5), (2, 64, 3), (9, 6, 1)] {
            let rows = heads * head_dim;
            let original: Vec<u32> = (0..(rows * row_len) as u32).collect();
            let mut data = permute(&original, rows, head_dim);
            unpermute_rope_rows(&mut data, rows, head_dim).unwrap();
            assert_eq!(data, original);
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (elements, rows, head_dim) in [(8, 8, 0), (9, 9, 3), (8, 8, 6), (9, 8, 4), (4, 0, 2)] {
            let mut data = vec![0_u8; elements];
            assert!(unpermute_rope_rows(&mut data, rows, head_dim).is_err());
        }
        unpermute_rope_rows::<u8>(&mut [], 0, 2).unwrap();
    }
}
