//! DRY ("don't repeat yourself"): repetitions of longer and longer passages less likely.

use std::collections::{BTreeMap, BTreeSet};

use mlex_core::Array;

use crate::Result;
use crate::text::Tokenizer;

/// Longer passages count as this long, so that no penalty is infinite.
const MAX_MATCH: usize = 50;

/// Where the last tokens stand earlier in the text too, the token that came next there gets
/// less likely: by `multiplier * base ^ (n - allowed_length)` in its logit, where `n >=
/// allowed_length` is how many tokens are the same. As text-generation-webui defines it
/// (`DRYLogitsProcessor`, pull request 5677), and llama.cpp after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// The penalty of a repetition of `allowed_length`.
    pub multiplier: f32,
    /// How the penalty grows with each token.
    pub base: f32,
    /// The shortest repetition that is penalized.
    pub allowed_length: u32,
    /// How many of the last tokens are looked at; 0 is all.
    pub range: u32,
    /// Tokens that end a passage.
    pub breakers: BTreeSet<u32>,
}

impl Dry {
    /// The texts that end a passage where nothing else is said.
    pub const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

    /// A penalty with the usual numbers: base 1.75, length 2, over all tokens.
    pub fn new(multiplier: f32) -> Self {
        Self {
            multiplier,
            base: 1.75,
            allowed_length: 2,
            range: 0,
            breakers: BTreeSet::new(),
        }
    }

    /// Adds the last tokens of texts to the breakers. A letter goes before each text, so that
    /// its token is the one within a text.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn break_at(&mut self, tokenizer: &Tokenizer, texts: &[impl AsRef<str>]) -> Result<()> {
        for text in texts {
            let ids = tokenizer.encode(&format!("a{}", text.as_ref()), false)?;
            self.breakers.extend(ids.last());
        }
        Ok(())
    }

    pub(super) fn validate(
        &self,
        check: &dyn Fn(&str, bool, &str, f32) -> Result<()>,
    ) -> Result<()> {
        let Self {
            multiplier, base, ..
        } = *self;
        check(
            "dry.multiplier",
            multiplier.is_finite() && multiplier >= 0.0,
            "a number of at least 0",
            multiplier,
        )?;
        check(
            "dry.base",
            base.is_finite() && base >= 1.0,
            "a number of at least 1",
            base,
        )
    }

    /// What is taken from the logits of tokens after `tokens`.
    fn penalties(&self, tokens: &[u32]) -> BTreeMap<u32, f32> {
        let start = match self.range {
            0 => 0,
            range => tokens.len().saturating_sub(range as usize),
        };
        let tokens = &tokens[start..];
        let mut lengths: BTreeMap<u32, usize> = BTreeMap::new();
        let Some((&last, before)) = tokens.split_last() else {
            return BTreeMap::new();
        };
        if self.breakers.contains(&last) {
            return BTreeMap::new();
        }
        for (at, &token) in before.iter().enumerate() {
            let next = tokens[at + 1];
            if token != last || self.breakers.contains(&next) {
                continue;
            }
            let mut same = 1;
            while same < MAX_MATCH.min(at + 1) {
                let token = tokens[tokens.len() - 1 - same];
                if tokens[at - same] != token || self.breakers.contains(&token) {
                    break;
                }
                same += 1;
            }
            let longest = lengths.entry(next).or_default();
            *longest = same.max(*longest);
        }
        let allowed = self.allowed_length as usize;
        lengths.retain(|_, length| *length >= allowed);
        let penalty = |length: usize| self.multiplier * self.base.powi((length - allowed) as i32);
        lengths
            .into_iter()
            // Finite, whatever the base is.
            .map(|(token, length)| (token, penalty(length).min(f32::MAX)))
            .collect()
    }
}

/// The tokens so far.
#[derive(Clone, Debug)]
pub(super) struct History {
    tokens: Vec<u32>,
    /// The last one, which may not be computed yet.
    next: Option<Array>,
}

impl History {
    pub(super) fn new(prompt: &[u32]) -> Self {
        Self {
            tokens: prompt.to_vec(),
            next: None,
        }
    }

    /// Remembers `token`, in place of one that was given since the last penalties.
    pub(super) fn push(&mut self, token: &Array) {
        self.next = Some(token.clone());
    }

    /// Keeps the last token for good. Waits for it.
    pub(super) fn settle(&mut self) -> Result<()> {
        if let Some(token) = self.next.take() {
            self.tokens.push(token.item::<i32>()? as u32);
        }
        Ok(())
    }

    /// `logits` `[1, V]` with the penalties. Waits for the last token.
    pub(super) fn penalize(&mut self, dry: &Dry, logits: Array) -> Result<Array> {
        self.settle()?;
        let penalties = dry.penalties(&self.tokens);
        if penalties.is_empty() {
            return Ok(logits);
        }
        let ids: Vec<i32> = penalties.keys().map(|&id| id as i32).collect();
        let values: Vec<f32> = penalties.values().map(|penalty| -penalty).collect();
        let shape = [1, ids.len() as i32];
        let ids = Array::from_slice(&ids, &shape)?;
        Ok(logits.scatter_add_axis(&ids, &Array::from_slice(&values, &shape)?, -1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalties(dry: &Dry, tokens: &[u32]) -> Vec<(u32, f32)> {
        dry.penalties(tokens).into_iter().collect()
    }

    #[test]
    fn a_repetition_is_penalized_by_its_length() {
        // multiplier 1, base 2: 2^(n - 2).
        let dry = Dry {
            base: 2.0,
            ..Dry::new(1.0)
        };
        assert_eq!(penalties(&dry, &[]), []);
        assert_eq!(penalties(&dry, &[1]), []);
        // One token the same is below the allowed length.
        assert_eq!(penalties(&dry, &[1, 2, 1]), []);
        assert_eq!(penalties(&dry, &[1, 2, 3, 1, 2]), [(3, 1.0)]);
        assert_eq!(penalties(&dry, &[0, 1, 2, 3, 0, 1, 2]), [(3, 2.0)]);
        // The longest of several counts, and each next token by its own.
        assert_eq!(
            penalties(&dry, &[9, 1, 2, 3, 1, 2, 3, 0, 1, 2, 4, 9, 1, 2]),
            [(3, 2.0), (4, 1.0)]
        );
        // A text of one token repeats itself: all but the last can be the same.
        assert_eq!(penalties(&dry, &[7, 7, 7, 7]), [(7, 2.0)]);
    }

    #[test]
    fn breakers_and_the_range_end_passages() {
        let mut dry = Dry {
            base: 2.0,
            ..Dry::new(1.0)
        };
        let text = [0, 1, 2, 3, 0, 1, 2];
        dry.breakers = BTreeSet::from([0]);
        assert_eq!(penalties(&dry, &text), [(3, 1.0)]);
        dry.breakers = BTreeSet::from([1]);
        assert_eq!(penalties(&dry, &text), []);
        for end in [2, 3] {
            dry.breakers = BTreeSet::from([end]);
            assert_eq!(penalties(&dry, &text), []);
        }
        dry.breakers.clear();
        for (range, expected) in [
            (7, vec![(3, 2.0)]),
            (6, vec![(3, 1.0)]),
            (5, vec![]),
            (100, vec![(3, 2.0)]),
        ] {
            dry.range = range;
            assert_eq!(penalties(&dry, &text), expected, "{range}");
        }
    }

    #[test]
    fn long_repetitions_stay_finite() {
        let dry = Dry {
            base: f32::MAX,
            ..Dry::new(1.0)
        };
        assert_eq!(penalties(&dry, &[5; 200]), [(5, f32::MAX)]);
        let dry = Dry {
            base: 2.0,
            ..Dry::new(1.0)
        };
        // 50 is the longest that counts.
        assert_eq!(penalties(&dry, &[5; 200]), [(5, 2f32.powi(48))]);
    }
}
