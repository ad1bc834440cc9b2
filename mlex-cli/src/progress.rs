//! Progress bars on stderr, where it is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use mlex_models::LoadProgress;
use mlex_models::generate::PrefillProgress;

/// Prompts shorter than this need no bar.
const LONG_PROMPT: usize = 64;
const TICK: Duration = Duration::from_millis(200);

/// A bar over bytes, such as those of a model's tensors.
#[derive(Clone, Debug)]
pub(crate) struct ByteBar(ProgressBar);

impl ByteBar {
    /// A bar named `what`; it shows when it is moved.
    pub(crate) fn new(what: &'static str) -> Self {
        let style = style("{prefix} {bar:30} {decimal_bytes} of {decimal_total_bytes}");
        Self(ProgressBar::new(0).with_style(style).with_prefix(what))
    }

    /// One for bytes that come over a network, with their speed.
    pub(crate) fn transfer(what: &'static str) -> Self {
        const BYTES: &str = "{prefix} {bar:30} {decimal_bytes} of {decimal_total_bytes}";
        let style = style(&format!("{BYTES} {{decimal_bytes_per_sec}} {{eta}}"));
        Self(ProgressBar::new(0).with_style(style).with_prefix(what))
    }

    /// Moves it.
    pub(crate) fn set(&self, progress: LoadProgress) {
        self.set_bytes(progress.loaded, progress.total);
    }

    /// Moves it.
    pub(crate) fn set_bytes(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Takes it away.
    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// A bar over the tokens of a prompt, if there are many.
#[derive(Debug)]
pub(crate) struct PrefillBar(Option<ProgressBar>);

impl PrefillBar {
    /// No bar yet.
    pub(crate) fn new() -> Self {
        Self(None)
    }

    /// Shows a bar for a prompt of `tokens`.
    pub(crate) fn start(&mut self, tokens: usize) {
        if tokens < LONG_PROMPT {
            return;
        }
        let style = style("prompt {bar:30} {pos} of {len} tokens {elapsed}");
        let bar = ProgressBar::new(tokens as u64).with_style(style);
        // The elapsed time goes on while a part of the prompt is computed.
        bar.enable_steady_tick(TICK);
        self.0 = Some(bar);
    }

    /// Moves it. The last step is announced before it is computed: the bar waits for its token.
    pub(crate) fn set(&self, progress: PrefillProgress) {
        if let Some(bar) = &self.0
            && progress.processed < progress.total
        {
            bar.set_position(progress.processed as u64);
        }
    }

    /// Takes it away, before text is printed.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for PrefillBar {
    fn drop(&mut self) {
        self.finish();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}
