//! A mixture of experts around its products: which rows go to which expert, and the weighted
//! sum of what comes back.

use crate::error::{check, check_len, product};
use crate::simd::Level;
use crate::simd::rows::Widen;
use crate::threads::parallel_chunks;
use crate::{Element, Floats, Result};

/// The experts of each token, and the order in which their products are computed: one row per
/// token and choice, rows of the same expert next to each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    per_token: usize,
    experts: Vec<u32>,
    tokens: Vec<u32>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl Routes {
    /// The `per_token` most probable experts of each token by softmax over its `experts`
    /// logits. Their probabilities are the weights, divided by their sum when `normalize`.
    ///
    /// # Errors
    /// When `logits` is not whole rows of `experts`, or `per_token` is 0 or more than them.
    pub fn top(
        logits: Floats<'_>,
        experts: usize,
        per_token: usize,
        normalize: bool,
    ) -> Result<Self> {
        const WHAT: &str = "routes: logits";
        check(
            (1..=experts).contains(&per_token),
            "routes: per_token",
            "at least one expert and no more than there are",
            per_token,
        )?;
        let whole = logits.len().is_multiple_of(experts);
        check(whole, WHAT, "whole rows", logits.len())?;
        check(
            u32::try_from(logits.len()).is_ok(),
            WHAT,
            "fewer than 2^32",
            logits.len(),
        )?;
        let count = logits.len() / experts;
        let all = logits.widened();
        let mut chosen = Vec::with_capacity(count * per_token);
        let mut weights = Vec::with_capacity(count * per_token);
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        for logits in all.chunks_exact(experts) {
            order.clear();
            order.extend(0..experts as u32);
            let logit = |expert: u32| logits[expert as usize];
            let by_logit = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
            if per_token < experts {
                order.select_nth_unstable_by(per_token - 1, by_logit);
            }
            let best = &mut order[..per_token];
            best.sort_unstable_by(by_logit);
            let largest = logit(best[0]);
            let exp = |expert: u32| (logit(expert) - largest).exp();
            let total: f32 = if normalize {
                best.iter().map(|&expert| exp(expert)).sum()
            } else {
                (0..experts as u32).map(exp).sum()
            };
            chosen.extend_from_slice(best);
            weights.extend(best.iter().map(|&expert| exp(expert) / total));
        }
        // Counting sort by expert; stable, so that tokens ascend within an expert.
        let mut starts = vec![0u32; experts + 1];
        for &expert in &chosen {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            starts[expert + 1] += starts[expert];
        }
        let mut sorted = vec![0; chosen.len()];
        let mut tokens = vec![0; chosen.len()];
        let mut rows = vec![0; chosen.len()];
        for (choice, &expert) in chosen.iter().enumerate() {
            let next = &mut starts[expert as usize];
            let row = *next as usize;
            *next += 1;
            sorted[row] = expert;
            tokens[row] = (choice / per_token) as u32;
            rows[choice] = row as u32;
        }
        Ok(Self {
            per_token,
            experts: sorted,
            tokens,
            rows,
            weights,
        })
    }

    /// The expert of each row; ascending.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The token of each row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The row of each token's choices, the most probable first: `[tokens, per_token]`.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// The weights of these choices, `[tokens, per_token]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Multiplies the weight of each choice by the factor of its expert.
    ///
    /// # Errors
    /// When an expert has no factor.
    pub fn scale(&mut self, factors: Floats<'_>) -> Result<()> {
        let experts = self.experts.last().map_or(0, |&expert| expert as usize + 1);
        let enough = factors.len() >= experts;
        check(
            enough,
            "routes: factors",
            "one for each expert",
            factors.len(),
        )?;
        let factors = factors.widened();
        for (weight, &row) in self.weights.iter_mut().zip(&self.rows) {
            *weight *= factors[self.experts[row as usize] as usize];
        }
        Ok(())
    }

    /// How many tokens there are.
    fn count(&self) -> usize {
        self.rows.len() / self.per_token
    }

    /// `out[row] = x[token of the row]`, rows of `size`.
    ///
    /// # Errors
    /// When `x` is not a row for each token, or `out` one for each row.
    pub fn gather<T: Element>(&self, out: &mut [T], x: &[T], size: usize) -> Result<()> {
        const WHAT: &str = "routes: rows to gather";
        check_len(WHAT, product(WHAT, &[self.count(), size])?, x.len())?;
        check_len(WHAT, product(WHAT, &[self.rows.len(), size])?, out.len())?;
        if size == 0 {
            return Ok(());
        }
        for (out, &token) in out.chunks_exact_mut(size).zip(&self.tokens) {
            out.copy_from_slice(&x[token as usize * size..][..size]);
        }
        Ok(())
    }

    /// `out[token] = sum of weight * y[row]` over the choices of the token, rows of `size`,
    /// summed in f32.
    ///
    /// # Errors
    /// When `out` is not a row for each token, or `y` one for each row.
    pub fn combine<T: Element>(&self, out: &mut [T], y: &[T], size: usize) -> Result<()> {
        const WHAT: &str = "routes: rows to combine";
        check_len(WHAT, product(WHAT, &[self.count(), size])?, out.len())?;
        check_len(WHAT, product(WHAT, &[self.rows.len(), size])?, y.len())?;
        if out.is_empty() {
            return Ok(());
        }
        let level = Level::current();
        let task = TASK.div_ceil(size * self.per_token).max(1);
        parallel_chunks(out, task * size, |first, out| {
            let mut sum = vec![0.0f32; size];
            let mut row = vec![0.0f32; size];
            for (i, out) in out.chunks_exact_mut(size).enumerate() {
                let choices = (first / size + i) * self.per_token..;
                sum.fill(0.0);
                for choice in choices.take(self.per_token) {
                    let from = &y[self.rows[choice] as usize * size..][..size];
                    level.dispatch(Widen { from, to: &mut row });
                    let weight = self.weights[choice];
                    for (sum, &y) in sum.iter_mut().zip(&row) {
                        *sum += weight * y;
                    }
                }
                for (out, &sum) in out.iter_mut().zip(&sum) {
                    *out = T::from_f32(sum);
                }
            }
        });
        Ok(())
    }
}

/// Numbers that one task adds up at least.
const TASK: usize = 16384;
