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
        match time.format_with_config(
            &config,
            format.replace("%Z", "").replace("%z", ""),
            &mut out,
        ) {
            Ok(()) => out,
            Err(_) => format.to_owned(),
        }
    }
}
