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

/// Which experts [`Routes::grouped`] looks at.
#[derive(Debug, Clone, Copy)]
pub struct ExpertGroups<'a> {
    /// How many groups of neighbours there are.
    pub count: usize,
    /// How many of them are looked at for a token.
    pub active: usize,
    /// What the weights are multiplied by.
    pub scale: f32,
    /// What has a say in the choice of each expert and none in its weight.
    pub correction: Floats<'a>,
}

/// How many tokens these logits are of.
fn tokens(logits: &Floats<'_>, experts: usize, per_token: usize) -> Result<usize> {
    const WHAT: &str = "routes: logits";
    check(
        (1..=experts).contains(&per_token),
        "routes: per_token",
        "at least one expert and no more than there are",
        per_token,
    )?;
    let whole = logits.len().is_multiple_of(experts);
    check(whole, WHAT, "whole rows", logits.len())?;
    let few = u32::try_from(logits.len()).is_ok();
    check(few, WHAT, "fewer than 2^32", logits.len())?;
    Ok(logits.len() / experts)
}

/// The places of the `count` largest values, the largest first; `order` starts with them.
fn largest<'a>(order: &'a mut Vec<u32>, values: &[f32], count: usize) -> &'a [u32] {
    order.clear();
    order.extend(0..values.len() as u32);
    let value = |place: u32| values[place as usize];
    let by_value = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count - 1, by_value);
    }
    let best = &mut order[..count];
    best.sort_unstable_by(by_value);
    best
}

/// The sum of the two largest.
fn two_largest(values: &[f32]) -> f32 {
    let (first, second) = values.iter().fold(
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        |(first, second), &value| {
            if value > first {
                (value, first)
            } else {
                (first, second.max(value))
            }
        },
    );
    first + second
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
        let count = tokens(&logits, experts, per_token)?;
        let all = logits.widened();
        let mut chosen = Vec::with_capacity(count * per_token);
        let mut weights = Vec::with_capacity(count * per_token);
        let mut order: Vec<u32> = Vec::with_capacity(experts);
        for logits in all.chunks_exact(experts) {
            let best = largest(&mut order, logits, per_token);
            let logit = |expert: u32| logits[expert as usize];
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
        Ok(Self::sorted(&chosen, weights, experts, per_token))
    }

    /// The `per_token` experts of each token with the largest sum of the logit's sigmoid and the
    /// expert's correction, out of the groups that count most ("DeepSeek-V3 Technical Report"): a
    /// group counts by its two best experts, and those of the other groups count as 0. The weights
    /// are the sigmoids, without the correction, times `groups.scale`; divided by their sum before
    /// that when `normalize` and there is more than one.
    ///
    /// # Errors
    /// As [`top`](Self::top), or when the groups do not divide the experts, have fewer than two of
    /// them, there are none to look at, or there is not a correction for each expert.
    pub fn grouped(
        logits: Floats<'_>,
        experts: usize,
        per_token: usize,
        normalize: bool,
        groups: &ExpertGroups<'_>,
    ) -> Result<Self> {
        let count = tokens(&logits, experts, per_token)?;
        let &ExpertGroups {
            count: group_count,
            active,
            scale,
            correction,
        } = groups;
        check_len("routes: correction", experts, correction.len())?;
        check(
            (1..=group_count).contains(&active),
            "routes: active groups",
            "at least one group and no more than there are",
            active,
        )?;
        let fits = experts.is_multiple_of(group_count)
            && (active == group_count || experts / group_count >= 2);
        let expected = "a divisor of the experts, with two of them in a group";
        check(fits, "routes: groups", expected, group_count)?;
        let size = experts / group_count;
        let correction = correction.widened();
        let mut chosen = Vec::with_capacity(count * per_token);
        let mut weights = Vec::with_capacity(count * per_token);
        let (mut order, mut group_order) = (Vec::new(), Vec::new());
        let (mut scores, mut ranked) = (vec![0.0f32; experts], vec![0.0f32; experts]);
        for logits in logits.widened().chunks_exact(experts) {
            for (score, logit) in scores.iter_mut().zip(logits) {
                *score = 1.0 / (1.0 + (-logit).exp());
            }
            for ((ranked, score), correction) in ranked.iter_mut().zip(&scores).zip(&*correction) {
                *ranked = score + correction;
            }
            if active < group_count {
                let standing: Vec<f32> = ranked.chunks_exact(size).map(two_largest).collect();
                largest(&mut group_order, &standing, active);
                for &group in &group_order[active..] {
                    ranked[group as usize * size..][..size].fill(0.0);
                }
            }
            let best = largest(&mut order, &ranked, per_token);
            let score = |&expert: &u32| scores[expert as usize];
            let total: f32 = if normalize && per_token > 1 {
                best.iter().map(score).sum::<f32>() + 1e-20
            } else {
                1.0
            };
            weights.extend(best.iter().map(|expert| score(expert) / total * scale));
            chosen.extend_from_slice(best);
        }
        Ok(Self::sorted(&chosen, weights, experts, per_token))
    }

    /// The routes of choices below `experts`.
    fn sorted(chosen: &[u32], weights: Vec<f32>, experts: usize, per_token: usize) -> Self {
        // Counting sort by expert; stable, so that tokens ascend within an expert.
        let mut starts = vec![0u32; experts + 1];
        for &expert in chosen {
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
        Self {
            per_token,
            experts: sorted,
            tokens,
            rows,
            weights,
        }
    }

    /// The expert of each row; ascending.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The token of each row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The row of each token's choices, the best first: `[tokens, per_token]`.
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
