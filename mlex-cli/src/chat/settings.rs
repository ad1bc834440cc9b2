//! How the answers of a chat are generated, by names.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};
use mlex_models::generate::{Dry, Request, SamplerConfig, Xtc};

use super::commands::Think;

/// How answers are generated and shown.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) request: Request,
    pub(super) show_reasoning: bool,
}

/// A value that can be off.
const OFF: &str = "off";

impl Settings {
    /// Sets what `/think` says.
    pub(super) fn think(&mut self, think: &Think) {
        match *think {
            Think::Enabled(enabled) => {
                let variables = &mut self.request.template_variables;
                variables.insert("enable_thinking".into(), enabled.into());
            }
            Think::Shown(shown) => self.show_reasoning = shown,
            Think::Budget(budget) => self.request.reasoning_budget = budget,
        }
    }

    /// Sets values by their names: all of them, or none.
    ///
    /// # Errors
    /// When there is no such name, or the value is not allowed.
    pub(super) fn change(&mut self, changes: &[(String, String)], vocab_size: i32) -> Result<()> {
        let mut request = self.request.clone();
        for (name, value) in changes {
            set(&mut request, name, value)?;
        }
        request.sampler.validate(vocab_size)?;
        self.request = request;
        Ok(())
    }
}

fn set(request: &mut Request, name: &str, value: &str) -> Result<()> {
    let sampler = &mut request.sampler;
    match name {
        "temp" => sampler.temperature = number(name, value)?,
        "top_p" => sampler.top_p = number(name, value)?,
        "top_k" => sampler.top_k = number(name, value)?,
        "min_p" => sampler.min_p = number(name, value)?,
        "typical_p" => sampler.typical_p = number(name, value)?,
        "xtc_probability" => {
            let threshold = sampler.xtc.as_ref().map_or(0.1, |xtc| xtc.threshold);
            sampler.xtc = Some(Xtc::new(number(name, value)?, threshold));
        }
        "xtc_threshold" => {
            let probability = sampler.xtc.as_ref().map_or(0.0, |xtc| xtc.probability);
            sampler.xtc = Some(Xtc::new(probability, number(name, value)?));
        }
        "dry_multiplier" => {
            let multiplier = number(name, value)?;
            sampler.dry.get_or_insert_with(|| Dry::new(0.0)).multiplier = multiplier;
        }
        "repetition_penalty" => sampler.repetition_penalty = number(name, value)?,
        "presence_penalty" => sampler.presence_penalty = number(name, value)?,
        "frequency_penalty" => sampler.frequency_penalty = number(name, value)?,
        "seed" if value == OFF => sampler.seed = None,
        "seed" => sampler.seed = Some(number(name, value)?),
        "max_tokens" => request.max_tokens = number(name, value)?,
        _ => bail!("/params: no {name:?}; /params lists the names"),
    }
    Ok(())
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    let number = value.parse();
    number.map_err(|_| anyhow::anyhow!("/params: {name}: expected a number, found {value:?}"))
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SamplerConfig {
            temperature,
            top_p,
            top_k,
            min_p,
            typical_p,
            ref xtc,
            ref dry,
            seed,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            ..
        } = self.request.sampler;
        let xtc = xtc.clone().unwrap_or_else(|| Xtc::new(0.0, 0.1));
        let dry = dry.as_ref().map_or(0.0, |dry| dry.multiplier);
        let seed = seed.map_or_else(|| OFF.to_owned(), |seed| seed.to_string());
        writeln!(
            f,
            "max_tokens={} temp={temperature} seed={seed}",
            self.request.max_tokens
        )?;
        writeln!(
            f,
            "top_p={top_p} top_k={top_k} min_p={min_p} typical_p={typical_p}"
        )?;
        writeln!(
            f,
            "xtc_probability={} xtc_threshold={} dry_multiplier={dry}",
            xtc.probability, xtc.threshold
        )?;
        write!(
            f,
            "repetition_penalty={repetition_penalty} presence_penalty={presence_penalty} \
             frequency_penalty={frequency_penalty}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings {
            request: Request::chat("x"),
            show_reasoning: true,
        }
    }

    fn change(settings: &mut Settings, name: &str, value: &str) -> Result<()> {
        settings.change(&[(name.to_owned(), value.to_owned())], 10)
    }

    #[test]
    fn every_name_that_is_shown_can_be_set() {
        let mut settings = settings();
        let shown = settings.to_string();
        for word in shown.split_whitespace() {
            let (name, value) = word.split_once('=').unwrap();
            change(&mut settings, name, value).unwrap();
        }
        assert_eq!(settings.to_string(), shown);
        change(&mut settings, "temp", "0.5").unwrap();
        change(&mut settings, "xtc_probability", "0.25").unwrap();
        assert!(settings.to_string().contains("temp=0.5"));
        assert!(
            settings
                .to_string()
                .contains("xtc_probability=0.25 xtc_threshold=0.1")
        );
    }

    #[test]
    fn wrong_values_change_nothing() {
        let mut settings = settings();
        for (name, value, expected) in [
            (
                "temp",
                "warm",
                "/params: temp: expected a number, found \"warm\"",
            ),
            (
                "temp",
                "-1",
                "temperature: expected a number of at least 0, found -1",
            ),
            (
                "warmth",
                "1",
                "/params: no \"warmth\"; /params lists the names",
            ),
        ] {
            let error = change(&mut settings, name, value).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(settings.request, Request::chat("x"));
    }
}
