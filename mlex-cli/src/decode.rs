//! The flags of ways to decode.

use mlex_models::generate::{Decode, Diffusion, SelfSpeculation};

use crate::failure;

/// How tokens come about, for a model that fills blocks too.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Decoding")]
pub(crate) struct DecodeArgs {
    /// One token after the other, blocks that are filled step by step, or blocks that are guessed
    /// and checked; the last two for models that have been made for them, and greedy
    #[arg(long, value_enum, default_value_t = Way::Ar, value_name = "WAY")]
    decode: Way,
    /// Positions of a block, which see each other
    #[arg(long, default_value_t = Diffusion::default().block_length, value_name = "N")]
    block_length: usize,
    /// With diffusion, take predictions from this probability on
    #[arg(long, default_value_t = Diffusion::default().threshold, value_name = "P")]
    threshold: f32,
    /// With self-spec, check so many tokens at once
    #[arg(long, default_value_t = SelfSpeculation::default().draft_length, value_name = "N")]
    draft_length: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    Ar,
    Diffusion,
    SelfSpec,
}

impl DecodeArgs {
    /// The way to decode.
    ///
    /// # Errors
    /// A usage error when a number is outside of its range.
    pub(crate) fn decode(&self, command: &str) -> anyhow::Result<Decode> {
        let &Self {
            block_length,
            threshold,
            draft_length,
            ..
        } = self;
        let decode = match self.decode {
            Way::Ar => Decode::Autoregressive,
            Way::Diffusion => Decode::Diffusion(Diffusion {
                block_length,
                threshold,
            }),
            Way::SelfSpec => Decode::SelfSpeculation(SelfSpeculation {
                draft_length,
                block_length,
            }),
        };
        decode
            .validate()
            .map_err(|error| failure::usage(command, error))?;
        Ok(decode)
    }
}
