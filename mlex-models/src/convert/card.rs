//! The model card: a README.md with the front matter that the Hub reads.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The largest card whose front matter is taken over.
const MAX_CARD_BYTES: u64 = 1 << 20;

/// What the card says.
pub(super) struct Card<'a> {
    /// The model's name.
    pub(super) name: &'a str,
    /// The Hub's name of the model that was converted, where it is known.
    pub(super) base_model: Option<&'a str>,
    /// How it is stored, a line each.
    pub(super) stored: &'a [String],
    /// Whether layers are quantized.
    pub(super) quantized: bool,
}

/// The front matter of a source's card: its entries, a key with the lines below it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct FrontMatter(Vec<(String, String)>);

impl FrontMatter {
    /// That of the card in a model directory; empty where there is none of use.
    pub(super) fn of_dir(dir: &Path) -> Self {
        let path = dir.join("README.md");
        let is_small =
            |metadata: &fs::Metadata| metadata.is_file() && metadata.len() <= MAX_CARD_BYTES;
        if !fs::metadata(&path).is_ok_and(|metadata| is_small(&metadata)) {
            return Self::default();
        }
        fs::read_to_string(&path).map_or(Self::default(), |card| Self::parse(&card))
    }

    /// That of a model whose licence is all that is known.
    pub(super) fn of_licence(licence: Option<&str>) -> Self {
        let entry = |licence: &str| {
            (
                "license".to_owned(),
                format!("license: {}\n", yaml(licence)),
            )
        };
        Self(licence.into_iter().map(entry).collect())
    }

    fn parse(card: &str) -> Self {
        let mut lines = card.lines();
        if lines.next().map(str::trim_end) != Some("---") {
            return Self::default();
        }
        let mut entries: Vec<(String, String)> = Vec::new();
        for line in lines {
            if line.trim_end() == "---" {
                return Self(entries);
            }
            let key = line
                .split_once(':')
                .map(|(key, _)| key)
                .filter(|key| !key.is_empty() && !key.starts_with([' ', '\t', '-', '#']));
            match (key, entries.last_mut()) {
                (Some(key), _) => entries.push((key.to_owned(), format!("{line}\n"))),
                (None, Some((_, text))) => {
                    text.push_str(line);
                    text.push('\n');
                }
                (None, None) => {}
            }
        }
        // It has no end.
        Self::default()
    }

    fn get(&self, key: &str) -> Option<&str> {
        let entry = self.0.iter().find(|(name, _)| name == key)?;
        Some(&entry.1)
    }

    /// The items of a list, written with dashes or in brackets.
    fn list(&self, key: &str) -> Vec<String> {
        let Some((_, text)) = self.get(key).and_then(|text| text.split_once(':')) else {
            return Vec::new();
        };
        let items: Vec<&str> = match text.trim().strip_prefix('[') {
            Some(inline) => inline.trim_end_matches(']').split(',').collect(),
            None => text
                .lines()
                .filter_map(|line| line.trim().strip_prefix('-'))
                .collect(),
        };
        items
            .into_iter()
            .map(|item| item.trim().trim_matches(['"', '\'']).to_owned())
            .filter(|item| !item.is_empty())
            .collect()
    }
}

impl Card<'_> {
    /// The text, with what is known from the source's front matter.
    pub(super) fn text(&self, source: &FrontMatter) -> String {
        let mut out = String::from("---\n");
        let ours = |key: &str| {
            ["library_name", "tags", "base_model_relation"].contains(&key)
                || (key == "base_model" && self.base_model.is_some())
        };
        for (_, text) in source.0.iter().filter(|(key, _)| !ours(key)) {
            out.push_str(text);
        }
        // Writing to a String does not fail.
        let _ = writeln!(out, "library_name: mlx");
        if source.get("pipeline_tag").is_none() {
            let _ = writeln!(out, "pipeline_tag: text-generation");
        }
        if let Some(base_model) = self.base_model {
            let _ = writeln!(out, "base_model: {}", yaml(base_model));
        }
        let has_base = self.base_model.is_some() || source.get("base_model").is_some();
        if self.quantized && has_base {
            let _ = writeln!(out, "base_model_relation: quantized");
        }
        let mut tags = source.list("tags");
        tags.retain(|tag| tag != "mlx");
        tags.push("mlx".to_owned());
        let _ = writeln!(out, "tags:");
        for tag in tags {
            let _ = writeln!(out, "- {}", yaml(&tag));
        }
        out.push_str("---\n\n");
        self.body(&mut out);
        out
    }

    fn body(&self, out: &mut String) {
        let Self {
            name,
            base_model,
            stored,
            ..
        } = self;
        let _ = writeln!(out, "# {name}\n");
        let version = env!("CARGO_PKG_VERSION");
        let from = base_model.map_or_else(String::new, |base| {
            format!(" from [{base}](https://huggingface.co/{base})")
        });
        let _ = writeln!(
            out,
            "Converted to MLX format{from} by mlex {version}. The weights are stored so:\n"
        );
        for line in *stored {
            let _ = writeln!(out, "- {line}");
        }
        let _ = writeln!(
            out,
            "\nWith mlex:\n\n```bash\nmlex generate --model PATH --prompt \"Hello\"\n```\n\n\
             With mlx-lm:\n\n```bash\npip install mlx-lm\nmlx_lm.generate --model PATH --prompt \
             \"Hello\"\n```\n\nPATH is this directory."
        );
    }
}

/// A YAML scalar: the text as it is where that is plain, otherwise quoted as in JSON, which YAML
/// reads too.
fn yaml(text: &str) -> String {
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/'))
        && !["true", "false", "null", "yes", "no", "on", "off"]
            .contains(&text.to_ascii_lowercase().as_str());
    if is_plain {
        text.to_owned()
    } else {
        serde_json::Value::String(text.to_owned()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "---\nlicense: apache-2.0\nlanguage:\n- en\n- fr\ntags:\n- chat\n- mlx\n\
                          library_name: transformers\nbase_model: a/b\n---\n# Text\ntags: none\n";

    fn card(base_model: Option<&str>, source: &FrontMatter) -> String {
        let card = Card {
            name: "model-4bit",
            base_model,
            stored: &["4-bit affine, group 64".to_owned()],
            quantized: true,
        };
        card.text(source)
    }

    #[test]
    fn the_sources_front_matter_is_kept() {
        let text = card(Some("org/model"), &FrontMatter::parse(SOURCE));
        let (front, body) = text[4..].split_once("---\n").unwrap();
        assert_eq!(
            front,
            "license: apache-2.0\nlanguage:\n- en\n- fr\nlibrary_name: mlx\n\
             pipeline_tag: text-generation\nbase_model: org/model\n\
             base_model_relation: quantized\ntags:\n- chat\n- mlx\n"
        );
        assert!(body.contains("# model-4bit\n"), "{body}");
        assert!(body.contains("- 4-bit affine, group 64\n"), "{body}");
        // Where the source's name is not known, what it says of its own origin holds on.
        let text = card(None, &FrontMatter::parse(SOURCE));
        assert!(text.contains("base_model: a/b\n"), "{text}");
    }

    #[test]
    fn front_matter_of_all_kinds() {
        for none in [
            "",
            "# Text\n",
            "---\nlicense: mit\n",
            "text\n---\na: b\n---\n",
        ] {
            assert_eq!(FrontMatter::parse(none), FrontMatter::default(), "{none}");
        }
        let inline = FrontMatter::parse("---\ntags: [chat, \"a b\", 'mlx']\n---\n");
        assert_eq!(inline.list("tags"), ["chat", "a b", "mlx"]);
        assert!(card(None, &inline).contains("tags:\n- chat\n- \"a b\"\n- mlx\n"));
        let odd = FrontMatter::of_licence(Some("x: [y]"));
        assert!(card(None, &odd).contains("license: \"x: [y]\"\n"));
    }
}
