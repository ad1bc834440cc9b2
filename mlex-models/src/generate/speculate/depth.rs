//! How many guesses are worth their time.
//!
//! A step that checks `k` guesses commits `1 + a + a^2 + .. + a^k` tokens where each guess is
//! right with probability `a` if the one before is. Steps are timed by `k`, guesses counted by
//! class, and the `k` with the most tokens per second is taken. Where that is none, a number of
//! chances are passed by, twice as many each time, before one guess is tried again.

use super::CLASSES;

/// How fast older observations fade.
const KEEP: f64 = 0.85;
/// What is believed of guesses before there are any: so many were right of so many.
const PRIOR: (f64, f64) = (1.6, 2.0);
/// A step with guesses must be faster by this factor: times are not exact.
const MARGIN: f64 = 1.03;
/// What a guess is thought to add to the time of a step, before any was timed.
const FIRST_COST: f64 = 0.05;
/// Steps without guesses that are timed before any guess.
const FIRST_STEPS: u32 = 2;
/// Chances that are passed by after the first loss, and at most.
const PAUSES: (u32, u32) = (4, 256);

/// Chooses a number of guesses.
#[derive(Debug)]
pub(super) struct Depth {
    /// Seconds of a step by its guesses.
    times: Vec<Time>,
    classes: [Class; CLASSES],
}

/// An average of what a step takes: of all steps at first, then of recent ones.
#[derive(Clone, Copy, Debug, Default)]
struct Time {
    seconds: f64,
    steps: u32,
}

impl Time {
    fn get(self) -> Option<f64> {
        (self.steps > 0).then_some(self.seconds)
    }

    fn learn(&mut self, seconds: f64) {
        self.steps = self.steps.saturating_add(1);
        let weight = (1.0 / f64::from(self.steps)).max(1.0 - KEEP);
        // What the machine did besides is not the step's.
        let seconds = match self.steps {
            1 => seconds,
            _ => seconds.min(3.0 * self.seconds),
        };
        self.seconds += weight * (seconds - self.seconds);
    }
}

#[derive(Clone, Copy, Debug)]
struct Class {
    right: f64,
    tried: f64,
    /// After a loss: chances still to be passed by before a guess is tried again.
    pass: Option<u32>,
    /// How many those were at first; 0 after a win.
    pause: u32,
}

impl Depth {
    pub(super) fn new(max: usize) -> Self {
        let class = Class {
            right: PRIOR.0,
            tried: PRIOR.1,
            pass: None,
            pause: 0,
        };
        Self {
            times: vec![Time::default(); max.min(1 << 10) + 1],
            classes: [class; CLASSES],
        }
    }

    /// How many guesses of a class to check, `most` at most.
    pub(super) fn choose(&mut self, class: usize, most: usize) -> usize {
        let most = most.min(self.times.len() - 1);
        if most == 0 || self.times[0].steps < FIRST_STEPS {
            return 0;
        }
        let Class {
            right, tried, pass, ..
        } = self.classes[class];
        let best = self.best(right / tried, most);
        let class = &mut self.classes[class];
        match pass {
            Some(0) => {
                // One guess, to see whether it still loses.
                1.min(most)
            }
            Some(left) => {
                class.pass = Some(left - 1);
                0
            }
            None if best > 0 => {
                class.pause = 0;
                best
            }
            None => {
                class.pause = (2 * class.pause).clamp(PAUSES.0, PAUSES.1);
                class.pass = Some(class.pause);
                0
            }
        }
    }

    /// Takes in a step that took `seconds` with `checked` guesses, of which `accepted` were right.
    pub(super) fn learn(&mut self, class: usize, checked: usize, accepted: usize, seconds: f64) {
        let Some(time) = self.times.get_mut(checked) else {
            return;
        };
        time.learn(seconds);
        if checked > 0 {
            let class = &mut self.classes[class];
            let tried = accepted + usize::from(accepted < checked);
            class.right = KEEP * class.right + accepted as f64;
            class.tried = KEEP * class.tried + tried as f64;
            class.pass = None;
        }
    }

    fn best(&self, rate: f64, most: usize) -> usize {
        let rate = rate.clamp(0.0, 0.99);
        let (mut best, mut speed) = (0, MARGIN / self.time(0));
        let (mut tokens, mut power) = (1.0, 1.0);
        let timed = self
            .times
            .iter()
            .rposition(|time| time.steps > 0)
            .unwrap_or(0);
        // One more than was timed: what further ones take is not known yet.
        for count in 1..=most.min(timed + 1) {
            power *= rate;
            tokens += power;
            let found = tokens / self.time(count);
            if found > speed {
                (best, speed) = (count, found);
            }
        }
        best
    }

    /// Seconds of a step with `count` guesses; between and beyond those that were timed, on a line.
    fn time(&self, count: usize) -> f64 {
        let timed = |index: usize| self.times.get(index)?.get();
        let below = (0..=count).rev().find_map(|at| Some((at, timed(at)?)));
        let above = (count..self.times.len()).find_map(|at| Some((at, timed(at)?)));
        let first = timed(0).unwrap_or(1.0);
        match (below, above) {
            (Some((at, time)), _) if at == count => time,
            (Some((low, from)), Some((high, to))) => {
                from + (to - from) * (count - low) as f64 / (high - low) as f64
            }
            (Some((0, time)), None) => time * (1.0 + FIRST_COST * count as f64),
            (Some((at, time)), None) => {
                let before = (0..at).rev().find_map(|at| Some((at, timed(at)?)));
                let (from, first) = before.unwrap_or((0, first));
                let slope = ((time - first) / (at - from) as f64).max(0.0);
                time + slope * (count - at) as f64
            }
            (None, _) => first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens per second over `steps` chances to guess up to `most` tokens that are right with
    /// probability `rate`, where a step takes `time` of its guesses; and how many were guessed.
    fn run(
        depth: &mut Depth,
        steps: usize,
        most: usize,
        rate: f64,
        time: fn(f64) -> f64,
    ) -> (f64, usize) {
        let (mut tokens, mut seconds, mut guessed) = (0.0, 0.0, 0);
        // A linear congruential generator.
        let mut random = 1u64;
        let mut happens = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((random >> 33) as f64) < rate * f64::from(1u32 << 31)
        };
        for _ in 0..steps {
            let count = depth.choose(0, most);
            let right = (0..count).take_while(|_| happens()).count();
            let time = time(count as f64);
            depth.learn(0, count, right, time);
            tokens += 1.0 + right as f64;
            seconds += time;
            guessed += count;
        }
        (tokens / seconds, guessed)
    }

    #[test]
    fn guesses_that_cost_little_and_are_right_are_made() {
        // 1 + 8 guesses take 1.4 times as long as a token: 9 / 1.4 tokens in the time of one.
        let mut depth = Depth::new(8);
        let (speed, _) = run(&mut depth, 400, 8, 1.0, |count| 1.0 + 0.05 * count);
        assert!(speed > 0.95 * 9.0 / 1.4, "{speed}");
        // Half of them right: the best is 3 guesses, 1.875 / 1.15, as arithmetic says.
        let mut depth = Depth::new(8);
        let (speed, _) = run(&mut depth, 4000, 8, 0.5, |count| 1.0 + 0.05 * count);
        assert!(speed > 0.93 * 1.875 / 1.15, "{speed}");
    }

    #[test]
    fn guesses_that_lose_are_given_up() {
        // Wrong ones.
        let mut depth = Depth::new(8);
        let (speed, guessed) = run(&mut depth, 2000, 8, 0.0, |count| 1.0 + 0.05 * count);
        assert!(speed > 0.99, "{speed}");
        assert!(guessed > 5, "they are tried again: {guessed}");
        // Right ones that take longer than a step without.
        let mut depth = Depth::new(8);
        let (speed, _) = run(&mut depth, 2000, 8, 0.9, |count| 1.0 + count);
        assert!(speed > 0.96, "{speed}");
        // Then they are right, and cost little: it is found out.
        run(&mut depth, 2000, 8, 1.0, |count| 1.0 + 0.05 * count);
        let (speed, _) = run(&mut depth, 400, 8, 1.0, |count| 1.0 + 0.05 * count);
        assert!(speed > 4.0, "{speed}");
    }

    #[test]
    fn nothing_is_guessed_before_a_step_is_timed_or_where_nothing_may_be() {
        let mut depth = Depth::new(4);
        assert_eq!(depth.choose(0, 4), 0);
        depth.learn(0, 0, 0, 1.0);
        depth.learn(0, 0, 0, 1.0);
        assert_eq!(depth.choose(0, 0), 0);
        assert_eq!(depth.choose(0, 4), 1);
        let mut none = Depth::new(0);
        none.learn(0, 0, 0, 1.0);
        none.learn(0, 0, 0, 1.0);
        assert_eq!(none.choose(0, 4), 0);
    }
}
