//! Files that lie about themselves.

use proptest::prelude::*;

use super::super::*;
use super::data;

/// Builds a file piece by piece.
#[derive(Default)]
struct Builder {
    pairs: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
    /// The data begin at a multiple of this.
    alignment: usize,
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

impl Builder {
    fn pair(mut self, key: &str, value_type: u32, value: &[u8]) -> Self {
        self.pairs
            .push([&text(key.as_bytes())[..], &value_type.to_le_bytes(), value].concat());
        self
    }

    /// `shape` as in the file, innermost first.
    fn tensor(mut self, name: &str, shape: &[u64], ggml_type: u32, offset: u64) -> Self {
        let mut entry = text(name.as_bytes());
        entry.extend((shape.len() as u32).to_le_bytes());
        entry.extend(shape.iter().flat_map(|n| n.to_le_bytes()));
        entry.extend(ggml_type.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    fn data(mut self, len: usize) -> Self {
        self.data = vec![7; len];
        self
    }

    fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.pair("general.alignment", 4, &alignment.to_le_bytes())
    }

    fn build(&self) -> Vec<u8> {
        let mut file = head(3, self.tensors.len() as u64, self.pairs.len() as u64);
        file.extend(self.pairs.concat());
        file.extend(self.tensors.concat());
        let alignment = if self.alignment == 0 {
            32
        } else {
            self.alignment
        };
        if !self.tensors.is_empty() {
            file.resize(file.len().next_multiple_of(alignment), 0);
        }
        file.extend(&self.data);
        file
    }

    fn parse(&self) -> Result<Header> {
        Header::parse(&self.build())
    }

    fn refused(&self) -> String {
        refused(&self.build())
    }
}

fn head(version: u32, tensors: u64, pairs: u64) -> Vec<u8> {
    [
        &b"GGUF"[..],
        &version.to_le_bytes(),
        &tensors.to_le_bytes(),
        &pairs.to_le_bytes(),
    ]
    .concat()
}

fn refused(file: &[u8]) -> String {
    let message = Header::parse(file).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

/// Parses, decodes and reads everything; only panics count.
fn read_all(file: &[u8]) {
    let Ok(header) = Header::parse(file) else {
        return;
    };
    for (name, info) in &header.tensors {
        let bytes = &file[info.range.clone()];
        let tensor = GgufTensor {
            name,
            info,
            bytes,
            path: Path::new("x"),
        };
        if tensor.decode().is_ok() && tensor.rows() > 0 {
            let mut row = vec![0.0; tensor.columns()];
            let _ = tensor.dequantize_rows(0..1, &mut row);
        }
    }
    for (key, _) in header.metadata.iter() {
        let _ = header.metadata.get::<Vec<u64>>(key);
    }
}

#[test]
fn only_little_endian_versions_2_and_3_are_read() {
    assert!(Header::parse(&head(2, 0, 0)).is_ok());
    assert!(Header::parse(&head(3, 0, 0)).is_ok());
    assert_eq!(
        refused(b"GGML\0\0\0\0"),
        "magic: expected \"GGUF\", found \"GGML\""
    );
    assert_eq!(
        refused(&head(1, 0, 0)),
        "version: expected 2 or 3, found 1 (convert the model again)"
    );
    assert_eq!(refused(&head(4, 0, 0)), "version: expected 2 or 3, found 4");
    assert_eq!(
        refused(&head(3_u32.swap_bytes(), 0, 0)),
        "byte order: expected little-endian, found big-endian"
    );
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused() {
    assert_eq!(
        refused(&head(3, u64::MAX, 0)),
        "tensor count: expected at most 0 in 0 bytes, found 18446744073709551615"
    );
    assert_eq!(
        refused(&[head(3, 0, 1 << 40), vec![0; 26]].concat()),
        "metadata count: expected at most 2 in 26 bytes, found 1099511627776"
    );
    let long_key = [head(3, 0, 1), u64::MAX.to_le_bytes().to_vec(), vec![0; 20]].concat();
    assert_eq!(
        refused(&long_key),
        "metadata key 0: expected at most 20 in 20 bytes, found 18446744073709551615"
    );
    for (element_type, most) in [
        (0_u32, 24),
        (4, 6),
        (6, 6),
        (7, 24),
        (8, 3),
        (9, 2),
        (10, 3),
    ] {
        let value = [
            &element_type.to_le_bytes()[..],
            &(1_u64 << 60).to_le_bytes(),
            &[0; 24],
        ]
        .concat();
        let message = Builder::default().pair("k", 9, &value).refused();
        let expected = format!(
            "metadata \"k\": expected at most {most} in 24 bytes, found {}",
            1_u64 << 60
        );
        assert_eq!(message, expected);
    }
}

#[test]
fn metadata_that_follow_no_type_are_refused() {
    let builder = || Builder::default();
    assert_eq!(
        builder().pair("k", 13, &[0; 8]).refused(),
        "metadata \"k\": expected a value type from 0 to 12, found 13"
    );
    let array = [&13_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat();
    assert_eq!(
        builder().pair("k", 9, &array).refused(),
        "metadata \"k\": expected a value type from 0 to 12, found 13"
    );
    assert_eq!(
        builder().pair("k", 7, &[2]).refused(),
        "metadata \"k\": expected a bool of 0 or 1, found 2"
    );
    let message = builder().pair("k", 8, &text(&[b'a', 0xff])).refused();
    assert!(
        message.starts_with("metadata \"k\": expected UTF-8"),
        "{message}"
    );
    assert_eq!(
        builder().pair("k", 0, &[1]).pair("k", 0, &[2]).refused(),
        "metadata \"k\": expected one value, found two"
    );
    assert_eq!(
        builder().pair("k", 10, &[0; 7]).refused(),
        "metadata \"k\": expected 8 bytes at 37, found the end of the file after 7"
    );
}

#[test]
fn arrays_of_arrays_are_read_to_a_depth_of_four() {
    let nested = |depth: usize| {
        let outer = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
        let inner = [&0_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &[5, 6]].concat();
        [outer.repeat(depth - 1), inner].concat()
    };
    let header = Builder::default().pair("k", 9, &nested(4)).parse().unwrap();
    let mut array = header.metadata.require::<&GgufArray>("k").unwrap();
    for _ in 0..3 {
        let GgufArray::Array(inner) = array else {
            panic!("{array:?}")
        };
        array = &inner[0];
    }
    assert_eq!(array, &GgufArray::U8(vec![5, 6]));
    for depth in [5, 1000, 100_000] {
        assert_eq!(
            Builder::default().pair("k", 9, &nested(depth)).refused(),
            "metadata \"k\": expected arrays at most 4 deep, found deeper ones"
        );
    }
}

#[test]
fn alignments_that_are_no_power_of_two_are_refused() {
    for alignment in [0, 24] {
        assert_eq!(
            Builder::default()
                .pair("general.alignment", 4, &u32::to_le_bytes(alignment))
                .refused(),
            format!("metadata \"general.alignment\": expected a power of two, found {alignment}")
        );
    }
    assert_eq!(
        Builder::default()
            .pair("general.alignment", 8, &text(b"x"))
            .refused(),
        "metadata \"general.alignment\": expected u32, found string"
    );
    let file = Builder::default()
        .alignment(64)
        .tensor("a", &[3], 0, 64)
        .data(76);
    let header = file.parse().unwrap();
    assert_eq!(header.tensors["a"].range, 192..204);
    assert_eq!(file.build().len(), 204);
    // Data that would begin far behind the end of the file.
    let mut file = Builder::default()
        .alignment(1 << 31)
        .tensor("a", &[3], 0, 0);
    file.alignment = 32;
    let message = file.refused();
    assert!(message.ends_with("a range within the 0 bytes of data, found 12 bytes at 0"));
}

#[test]
fn tensors_that_leave_the_file_or_overlap_are_refused() {
    let builder = || Builder::default().data(64);
    assert_eq!(
        builder().tensor("a", &[17], 0, 0).refused(),
        "tensor \"a\": offset: expected a range within the 64 bytes of data, found 68 bytes at 0"
    );
    assert_eq!(
        builder().tensor("a", &[9], 0, 32).refused(),
        "tensor \"a\": offset: expected a range within the 64 bytes of data, found 36 bytes at 32"
    );
    let far = u64::MAX - 31;
    assert_eq!(
        builder().tensor("a", &[1], 0, far).refused(),
        format!(
            "tensor \"a\": offset: expected a range within the 64 bytes of data, \
             found 4 bytes at {far}"
        )
    );
    assert_eq!(
        builder().tensor("a", &[1], 0, 4).refused(),
        "tensor \"a\": offset: expected a multiple of 32, found 4"
    );
    assert_eq!(
        builder()
            .tensor("b", &[10], 0, 0)
            .tensor("a", &[8], 0, 32)
            .refused(),
        "tensor \"a\": offset: expected bytes after those of \"b\", found 8 bytes of them"
    );
    assert_eq!(
        builder()
            .tensor("a", &[1], 0, 0)
            .tensor("a", &[1], 0, 32)
            .refused(),
        "tensor \"a\": name: expected one tensor, found two"
    );
    // In any order, with a gap, and with an empty one in between.
    let file = Builder::default()
        .data(100)
        .tensor("b", &[9], 0, 64)
        .tensor("none", &[0, 5], 0, 32)
        .tensor("a", &[8], 0, 0);
    assert_eq!(file.parse().unwrap().tensors["none"].shape, [5, 0]);
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    let builder = || Builder::default().data(64);
    assert_eq!(
        builder().tensor("a", &[1; 5], 0, 0).refused(),
        "tensor \"a\": dimension count: expected at most 4, found 5"
    );
    assert_eq!(
        builder().tensor("a", &[48, 2], 8, 0).refused(),
        "tensor \"a\": shape: expected rows of a multiple of 32 for Q8_0, found [2, 48]"
    );
    // 2^33 * 2^32 * 4 bytes wrap to 0.
    assert_eq!(
        builder().tensor("a", &[1 << 32, 1 << 32], 0, 0).refused(),
        "tensor \"a\": shape: expected less than 2^64 bytes, found [4294967296, 4294967296]"
    );
    let scalar = builder().tensor("a", &[], 0, 0).build();
    assert_eq!(Header::parse(&scalar).unwrap().tensors["a"].range.len(), 4);
    read_all(&scalar);
    read_all(
        &builder()
            .tensor("a", &[0, u64::MAX, u64::MAX, u64::MAX], 0, 0)
            .build(),
    );
    read_all(
        &builder()
            .tensor("a", &[32, u64::MAX, u64::MAX, 0], 8, 0)
            .build(),
    );
}

#[test]
fn an_unknown_type_is_an_error_only_when_it_is_asked_for() {
    use std::io::Write;
    let file = Builder::default()
        .data(96)
        .tensor("new", &[8], 1000, 0)
        .tensor("iq", &[256], 16, 0)
        .tensor("b", &[1], 0, 64)
        .build();
    // IQ2_XXS has 66 bytes, so the last one overlaps it.
    assert!(refused(&file).contains("tensor \"b\""));
    let file = Builder::default()
        .data(132)
        .tensor("new", &[8], 1000, 128)
        .tensor("iq", &[256], 16, 0)
        .tensor("b", &[1], 0, 96)
        .build();
    let mut stored = tempfile::NamedTempFile::new().unwrap();
    stored.write_all(&file).unwrap();
    let file = GgufFile::open(stored.path()).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["b", "iq", "new"]);
    assert_eq!(file.info("new").unwrap().ggml_type, GgmlType::Unknown(1000));
    assert!(file.tensor("b").unwrap().decode().is_ok());
    let message = |error: Error| {
        assert_eq!(error.path(), Some(stored.path()));
        error
            .with_path("")
            .to_string()
            .split_once(": ")
            .unwrap()
            .1
            .to_owned()
    };
    assert_eq!(
        message(file.tensor("new").unwrap_err()),
        "tensor \"new\": type: expected a known ggml type, found 1000"
    );
    assert_eq!(
        message(file.tensor("iq").unwrap().decode().unwrap_err()),
        "tensor \"iq\": type: expected a type that can be read, found IQ2_XXS"
    );
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = std::fs::read(data("all_types.gguf")).unwrap();
    let header = Header::parse(&file).unwrap();
    let end = header
        .tensors
        .values()
        .map(|info| info.range.end)
        .max()
        .unwrap();
    for length in 0..end {
        assert!(Header::parse(&file[..length]).is_err(), "{length}");
    }
    assert!(Header::parse(&file[..end]).is_ok());
}

proptest! {
    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = std::fs::read(data("all_types.gguf")).unwrap();
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        read_all(&file);
    }

    /// Near the front, where counts, lengths and types are.
    #[test]
    fn changed_headers_never_panic(
        changes in prop::collection::vec((0_usize..1700, any::<u8>()), 1..4),
    ) {
        let mut file = std::fs::read(data("all_types.gguf")).unwrap();
        for (at, byte) in changes {
            file[at] = byte;
        }
        read_all(&file);
    }

    #[test]
    fn any_bytes_after_the_magic_never_panic(rest in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut file = head(3, 1, 1);
        file.extend(rest);
        read_all(&file);
    }
}
