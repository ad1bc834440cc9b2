//! The time that `strftime_now` shows.

use jiff::civil::DateTime;
use jiff::fmt::strtime::{BrokenDownTime, Config};

/// A date and time of day without a time zone, as Python's `datetime.now()` gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalTime(DateTime);

impl LocalTime {
    /// The time now, in the system's time zone.
    pub fn now() -> Self {
        Self(jiff::Zoned::now().datetime())
    }

    /// A date and time; `None` if there is no such day or time.
    pub fn new(year: i16, month: i8, day: i8, hour: i8, minute: i8, second: i8) -> Option<Self> {
        DateTime::new(year, month, day, hour, minute, second, 0)
            .ok()
            .map(Self)
    }

    /// The time by a format of `strftime`. What the format cannot mean stays as it is, and a
    /// time zone is empty.
    pub(super) fn format(&self, format: &str) -> String {
        let config = Config::new().lenient(true);
        let mut out = String::new();
        let time = BrokenDownTime::from(self.0);
        match time.format_with_config(&config, self.fill(format), &mut out) {
            Ok(()) => out,
            Err(_) => format.to_owned(),
        }
    }

    /// The format without what Python sees otherwise: no time zone, and `%f` as microseconds.
    fn fill(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len());
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            match characters.next() {
                Some('Z' | 'z') => {}
                Some('f') => out.push_str(&format!("{:06}", self.0.subsec_nanosecond() / 1000)),
                Some(directive) => out.extend(['%', directive]),
                None => out.push('%'),
            }
        }
        out
    }
}
