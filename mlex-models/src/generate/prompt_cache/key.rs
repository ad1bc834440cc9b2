//! What a state is the state of.

use std::ops::Range;

/// Tokens of a prompt that stand for an image, a sound or a film: what they mean is not in their
/// ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// The tokens.
    pub tokens: Range<usize>,
    /// A hash of the content and of how it was prepared, SHA-256.
    pub digest: [u8; 32],
}

/// The tokens of a prompt, and the media among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptKey {
    tokens: Vec<u32>,
    /// In order, not overlapping.
    media: Vec<MediaSpan>,
}

impl PromptKey {
    /// A prompt of tokens alone.
    pub fn new(tokens: Vec<u32>) -> Self {
        let media = Vec::new();
        Self { tokens, media }
    }

    /// A prompt with media in it; none when their tokens overlap or are not in it.
    pub fn with_media(tokens: Vec<u32>, mut media: Vec<MediaSpan>) -> Option<Self> {
        media.sort_by_key(|span| span.tokens.start);
        let mut end = 0;
        for MediaSpan { tokens: span, .. } in &media {
            if span.start < end || span.is_empty() || span.end > tokens.len() {
                return None;
            }
            end = span.end;
        }
        Some(Self { tokens, media })
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The media, in order.
    pub fn media(&self) -> &[MediaSpan] {
        &self.media
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// How many tokens at the beginning mean the same in both. What stands for a medium is the
    /// same as a whole or not at all.
    pub(super) fn common(&self, other: &Self) -> usize {
        let tokens = self.tokens.iter().zip(&other.tokens);
        let same = tokens.take_while(|(a, b)| a == b).count();
        let mut spans = self.media.iter().zip(&other.media);
        let differ = spans.find(|(a, b)| a != b);
        let first_only = |one: &Self, other: &Self| {
            let span = one.media.get(other.media.len());
            span.map(|span| span.tokens.start)
        };
        let end = match differ {
            Some((a, b)) => Some(a.tokens.start.min(b.tokens.start)),
            None => first_only(self, other).or_else(|| first_only(other, self)),
        };
        self.cut(end.map_or(same, |end| same.min(end)))
    }

    /// `length`, or less where that is inside of a medium.
    pub(super) fn cut(&self, length: usize) -> usize {
        let mut spans = self.media.iter().map(|span| &span.tokens);
        let inside = spans.find(|span| span.start < length && length < span.end);
        inside.map_or(length, |span| span.start)
    }

    /// Whether `other` is its beginning.
    pub(super) fn starts_with(&self, other: &Self) -> bool {
        other.len() <= self.len() && self.common(other) == other.len()
    }

    /// The first `length` tokens. None where that is inside of a medium.
    pub(super) fn prefix(&self, length: usize) -> Option<Self> {
        let tokens = self.tokens.get(..length)?.to_vec();
        let media = self.media.iter();
        let media = media.take_while(|span| span.tokens.start < length);
        (self.cut(length) == length).then(|| Self {
            tokens,
            media: media.cloned().collect(),
        })
    }

    /// With more tokens behind.
    pub(in crate::generate) fn followed_by(&self, more: &[u32]) -> Self {
        let mut longer = self.clone();
        longer.tokens.extend_from_slice(more);
        longer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(media: &[(Range<usize>, u8)]) -> PromptKey {
        let span = |(tokens, byte): &(Range<usize>, u8)| MediaSpan {
            tokens: tokens.clone(),
            digest: [*byte; 32],
        };
        let spans = media.iter().map(span).collect();
        PromptKey::with_media(vec![7; 20], spans).unwrap_or_else(|| panic!("{media:?}"))
    }

    #[test]
    fn media_are_compared_by_content() {
        let one = key(&[(4..8, 1), (12..16, 2)]);
        assert_eq!(one.common(&one), 20);
        assert_eq!(one.common(&key(&[(4..8, 1), (12..16, 3)])), 12);
        assert_eq!(one.common(&key(&[(4..8, 9), (12..16, 2)])), 4);
        assert_eq!(one.common(&key(&[(4..8, 1)])), 12);
        assert_eq!(key(&[]).common(&one), 4);
        assert_eq!(one.common(&key(&[(3..8, 1)])), 3);
        assert!(one.starts_with(&one) && !one.starts_with(&key(&[])));
    }

    #[test]
    fn a_medium_is_not_cut() {
        let one = key(&[(4..8, 1)]);
        assert_eq!([4, 5, 7, 8].map(|length| one.cut(length)), [4, 4, 4, 8]);
        let shorter = one.prefix(8);
        assert_eq!(shorter.map_or(0, |key| key.media().len()), 1);
        assert_eq!(one.prefix(4).map_or(9, |key| key.media().len()), 0);
        assert!(one.prefix(6).is_none() && one.prefix(21).is_none());
        // The other prompt ends inside of it.
        let tokens = PromptKey::new(vec![7; 6]);
        assert_eq!(one.common(&tokens), 4);
    }

    #[test]
    fn media_that_do_not_fit_are_refused() {
        let span = |tokens| MediaSpan {
            tokens,
            digest: [0; 32],
        };
        for wrong in [&[0..3, 2..4][..], &[3..3, 4..5], &[0..1, 18..21]] {
            let media = wrong.iter().cloned().map(span).collect();
            assert_eq!(PromptKey::with_media(vec![7; 20], media), None);
        }
    }
}
