//! Guesses by what followed the last tokens earlier: prompt lookup decoding
//! (<https://github.com/apoorvumang/prompt-lookup-decoding>).

use std::collections::HashMap;

use super::{CLASSES, Drafter};
use crate::Result;
use crate::generate::Sampler;

/// How many of the last tokens are looked for, by class: the more, the surer the guess.
const LENGTHS: [usize; CLASSES] = [6, 3, 2];
const LONGEST: usize = 6;

/// Where tokens were seen last.
#[derive(Debug, Default)]
pub(super) struct Ngram {
    /// For each length, the place after the last occurrence of tokens, with something behind it.
    places: [HashMap<[u32; LONGEST], usize>; CLASSES],
    /// Tokens that are in the maps.
    tokens: Vec<u32>,
    /// Where the guess is found.
    found: Option<usize>,
}

/// The `length` tokens before `end`.
fn key(tokens: &[u32], end: usize, length: usize) -> Option<[u32; LONGEST]> {
    let last = tokens.get(end.checked_sub(length)?..end)?;
    let mut key = [u32::MAX; LONGEST];
    key[..length].copy_from_slice(last);
    Some(key)
}

impl Ngram {
    /// Adds what is new of `tokens` to the maps. The last tokens have nothing behind them yet.
    fn follow(&mut self, tokens: &[u32]) {
        let same = self.tokens.iter().zip(tokens);
        let same = same.take_while(|(a, b)| a == b).count();
        if same < self.tokens.len() {
            // Tokens were taken back, which is rare: places may lie beyond them.
            self.places.iter_mut().for_each(HashMap::clear);
            self.tokens.clear();
        }
        let from = self.tokens.len();
        self.tokens.extend_from_slice(&tokens[from..]);
        for end in from.max(1)..tokens.len() {
            for (places, length) in self.places.iter_mut().zip(LENGTHS) {
                if let Some(key) = key(tokens, end, length) {
                    places.insert(key, end);
                }
            }
        }
    }
}

impl Drafter for Ngram {
    fn class(&mut self, tokens: &[u32]) -> Option<usize> {
        self.follow(tokens);
        let mut pairs = self.places.iter().zip(LENGTHS).enumerate();
        let found = pairs.find_map(|(class, (places, length))| {
            let place = places.get(&key(tokens, tokens.len(), length)?)?;
            Some((class, *place))
        });
        self.found = found.map(|(_, place)| place);
        found.map(|(class, _)| class)
    }

    fn draft(&mut self, tokens: &[u32], count: usize, _: &Sampler) -> Result<Vec<u32>> {
        let mut drafts = Vec::with_capacity(count);
        if let Some(place) = self.found {
            for at in place..place + count {
                // What repeats itself goes on in the guess.
                let token = tokens.get(at).or_else(|| drafts.get(at - tokens.len()));
                drafts.extend(token.copied());
            }
        }
        Ok(drafts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::SamplerConfig;

    fn guess(ngram: &mut Ngram, tokens: &[u32], count: usize) -> Option<(usize, Vec<u32>)> {
        let sampler = Sampler::new(SamplerConfig::default(), 100, &[]).expect("a greedy sampler");
        let class = ngram.class(tokens)?;
        let drafts = ngram.draft(tokens, count, &sampler);
        Some((class, drafts.expect("a lookup cannot fail")))
    }

    #[test]
    fn what_followed_is_guessed() {
        let mut ngram = Ngram::default();
        for tokens in [&[][..], &[1], &[1, 2], &[1, 2, 3], &[1, 2, 3, 1]] {
            assert_eq!(guess(&mut ngram, tokens, 2), None);
        }
        let tokens = [1, 2, 3, 1, 2];
        assert_eq!(guess(&mut ngram, &tokens, 2), Some((2, vec![3, 1])));
        // Beyond the end it goes on with the guess itself.
        assert_eq!(
            guess(&mut ngram, &tokens, 7),
            Some((2, vec![3, 1, 2, 3, 1, 2, 3]))
        );
        // Three the same are surer, and the last occurrence counts.
        let tokens = [1, 2, 3, 1, 2, 4, 9, 1, 2, 5, 3, 1, 2];
        assert_eq!(guess(&mut ngram, &tokens, 1), Some((1, vec![4])));
        let tokens = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6];
        assert_eq!(guess(&mut ngram, &tokens, 3), Some((0, vec![7, 0, 1])));
    }

    #[test]
    fn tokens_can_be_taken_back() {
        let mut ngram = Ngram::default();
        assert_eq!(guess(&mut ngram, &[1, 2, 3, 1, 2], 1), Some((2, vec![3])));
        assert_eq!(guess(&mut ngram, &[1, 2, 4, 1, 2], 1), Some((2, vec![4])));
        assert_eq!(guess(&mut ngram, &[1, 2], 1), None);
    }
}
