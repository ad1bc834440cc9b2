use std::io::Write;

use proptest::prelude::*;

use super::*;

/// A file of that header and that many bytes of data: 0, 1, 2, ...
fn file_of(header: &str, data_len: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend((0..data_len).map(|i| i as u8));
    file
}

fn parse(header: &str, data_len: usize) -> Result<Header> {
    Header::parse(&file_of(header, data_len))
}

/// The message of the error that `header` leads to.
fn refused(header: &str, data_len: usize) -> String {
    let message = match parse(header, data_len) {
        Ok(_) => panic!("accepted: {header}"),
        Err(error) => error.to_string(),
    };
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn a_file_is_opened_and_its_tensors_are_found() {
    let header = r#"{"__metadata__":{"format":"mlx"},
        "b":{"dtype":"BF16","shape":[],"data_offsets":[12,14]},
        "a":{"dtype":"F32","shape":[3,1],"data_offsets":[0,12]},
        "none":{"dtype":"U8","shape":[2,0],"data_offsets":[12,12]}}   "#;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&file_of(header, 14)).unwrap();

    let file = SafetensorsFile::open(file.path()).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b", "none"]);
    assert_eq!(file.metadata()["format"], "mlx");
    let a = file.info("a").unwrap();
    assert_eq!(
        (a.dtype, a.shape.as_slice()),
        (StoredDtype::F32, &[3, 1][..])
    );
    assert_eq!(file.bytes("a").unwrap(), (0..12).collect::<Vec<u8>>());
    file.release("a");
    assert_eq!(file.bytes("b").unwrap(), [12, 13]);
    assert_eq!(file.info("b").unwrap().shape, [0_usize; 0]);
    assert!(file.bytes("none").unwrap().is_empty());

    assert!(file.info("c").is_none());
    let error = file.bytes("c").unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::MissingTensor));
    assert_eq!(
        (error.path(), error.tensor()),
        (Some(file.path()), Some("c"))
    );
}

#[test]
fn an_empty_set_of_tensors_is_a_file() {
    assert!(parse("{}", 0).unwrap().tensors.is_empty());
}

#[test]
fn header_lengths_beyond_the_file_are_refused() {
    assert_eq!(
        Header::parse(b"1234567").err().unwrap().to_string(),
        "file: expected at least 8 bytes, found 7 bytes"
    );
    let mut file = file_of("{}", 0);
    file[0] = 3;
    let error = Header::parse(&file).err().unwrap();
    assert_eq!(
        error.to_string(),
        "header length: expected at most the 2 bytes that follow, found 3"
    );
    file[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = Header::parse(&file).err().unwrap();
    assert_eq!(
        error.to_string(),
        "header length: expected at most 100000000 bytes, found 18446744073709551615"
    );
}

#[test]
fn headers_that_are_no_json_object_of_tensors_are_refused() {
    let mut file = file_of("{ }", 0);
    file[9] = 0xff;
    assert!(
        Header::parse(&file)
            .err()
            .unwrap()
            .to_string()
            .starts_with("header: expected UTF-8")
    );
    for header in [
        "",
        "{",
        "[]",
        "null",
        "{}{}",
        "\"a\"",
        r#"{"a":1}"#,
        r#"{"a":{}}"#,
    ] {
        let message = refused(header, 0);
        assert!(
            message.starts_with("header: expected a JSON object of tensors"),
            "{message}"
        );
    }
    let deep = "[".repeat(200_000);
    refused(&deep, 0);
    refused(&format!(r#"{{"a":{deep}"#), 0);
    refused(r#"{"__metadata__":{"a":1}}"#, 0);
    let message = refused(
        r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}"#,
        0,
    );
    assert!(
        message.contains("\"a\": invalid value: integer `-1`"),
        "{message}"
    );
}

#[test]
fn names_given_twice_are_refused() {
    let tensor = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let message = refused(&format!("{{{tensor},{tensor}}}"), 1);
    assert!(message.contains("\"a\" is given twice"), "{message}");
    let message = refused(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0);
    assert!(message.contains("\"k\" is given twice"), "{message}");
    let message = refused(r#"{"__metadata__":{},"__metadata__":{}}"#, 0);
    assert!(
        message.contains("\"__metadata__\" is given twice"),
        "{message}"
    );
}

#[test]
fn unknown_dtypes_are_refused_by_tensor() {
    let message = refused(
        r#"{"a":{"dtype":"Q8","shape":[1],"data_offsets":[0,1]}}"#,
        1,
    );
    assert!(
        message.starts_with("tensor \"a\": dtype: expected one of BOOL, U8"),
        "{message}"
    );
    assert!(message.ends_with("found \"Q8\""), "{message}");
}

#[test]
fn shapes_that_need_another_number_of_bytes_are_refused() {
    let message = refused(
        r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,10]}}"#,
        10,
    );
    assert_eq!(
        message,
        "tensor \"a\": data_offsets: expected 12 bytes for F16 [2, 3], found 10 bytes"
    );
    // 2^32 * 2^32 bytes wrap to the 0 bytes that are there.
    let header = r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    let message = refused(header, 0);
    assert!(message.contains("more than 2^64 bytes"), "{message}");
}

#[test]
fn ranges_outside_of_the_data_are_refused() {
    for offsets in [
        "[0,5]",
        "[3,2]",
        "[18446744073709551615,0]",
        "[0,18446744073709551615]",
    ] {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[5],"data_offsets":{offsets}}}}}"#);
        let message = refused(&header, 4);
        assert!(
            message.contains("a range within the 4 bytes of data"),
            "{message}"
        );
    }
}

#[test]
fn ranges_that_overlap_or_leave_gaps_are_refused() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{a}}},
                "b":{{"dtype":"U8","shape":[2],"data_offsets":{b}}}}}"#
        )
    };
    parse(&two("[2,4]", "[0,2]"), 4).unwrap();
    assert_eq!(
        refused(&two("[0,2]", "[1,3]"), 3),
        "tensor \"b\": data_offsets[0]: expected 2, found 1"
    );
    assert_eq!(
        refused(&two("[0,2]", "[3,5]"), 5),
        "tensor \"b\": data_offsets[0]: expected 2, found 3"
    );
    assert_eq!(
        refused(&two("[1,3]", "[3,5]"), 5),
        "tensor \"a\": data_offsets[0]: expected 0, found 1"
    );
    assert_eq!(
        refused(&two("[0,2]", "[2,4]"), 5),
        "data: expected 4 bytes, found 5 bytes"
    );
}

#[test]
fn text_of_the_file_stays_on_one_line_in_errors() {
    let name = "x\\n".repeat(5000);
    let message = refused(
        &format!(r#"{{"{name}":{{"dtype":"U8","shape":"y","data_offsets":[0,1]}}}}"#),
        1,
    );
    assert!(message.len() < 1000, "{message}");
    let dtype = "\\u0007\\r\\n".repeat(5000);
    let message = refused(
        &format!(r#"{{"a":{{"dtype":"{dtype}","shape":[],"data_offsets":[0,1]}}}}"#),
        1,
    );
    assert!(message.len() < 1000, "{message}");
}

const VALID: &str = concat!(
    r#"{"__metadata__":{"format":"mlx"},"#,
    r#""a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"#,
    r#""b":{"dtype":"I64","shape":[1],"data_offsets":[16,24]},"#,
    r#""c":{"dtype":"U8","shape":[],"data_offsets":[24,25]}}"#,
);

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = file_of(VALID, 25);
    assert!(Header::parse(&file).is_ok());
    for length in 0..file.len() {
        assert!(Header::parse(&file[..length]).is_err(), "{length}");
    }
}

/// What we accept, the format's own library accepts too, and finds the same tensors.
fn agrees_with_the_library(file: &[u8]) -> Result<(), TestCaseError> {
    let Ok(ours) = Header::parse(file) else {
        return Ok(());
    };
    let theirs = safetensors::SafeTensors::deserialize(file)
        .map_err(|error| TestCaseError::fail(error.to_string()))?;
    prop_assert_eq!(ours.tensors.len(), theirs.len());
    for (name, info) in &ours.tensors {
        let tensor = theirs
            .tensor(name)
            .map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(info.dtype.name(), tensor.dtype().to_string());
        prop_assert_eq!(&info.shape, tensor.shape());
        prop_assert_eq!(&file[info.range.clone()], tensor.data());
    }
    Ok(())
}

proptest! {
    #[test]
    fn changed_bytes_never_panic(
        changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..4),
    ) {
        let mut file = file_of(VALID, 25);
        for (at, byte) in changes {
            let at = at % file.len();
            file[at] = byte;
        }
        agrees_with_the_library(&file)?;
    }

    #[test]
    fn changed_digits_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..4),
    ) {
        let mut file = file_of(VALID, 25);
        let digits: Vec<_> = (8..file.len()).filter(|&i| file[i].is_ascii_digit()).collect();
        for (which, digit) in changes {
            file[digits[which.index(digits.len())]] = digit;
        }
        agrees_with_the_library(&file)?;
    }
}
