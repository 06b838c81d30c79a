//! What a result says about the machine and the moment.

use std::process::Command;

use nix::sys::utsname::uname;

/// Release and version of the running kernel.
pub fn kernel() -> String {
    match uname() {
        Ok(u) => format!(
            "{} {}",
            u.release().to_string_lossy(),
            u.version().to_string_lossy()
        ),
        Err(_) => "unknown".to_owned(),
    }
}

/// "2 x model name" from /proc/cpuinfo.
pub fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models: Vec<&str> = info
        .lines()
        .filter_map(|line| {
            line.strip_prefix("model name")?
                .split_once(": ")
                .map(|(_, m)| m)
        })
        .collect();
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{count} x {}", models.first().unwrap_or(&"unknown"))
}

/// Commit (and `-dirty`) of the source tree around the working directory.
pub fn git() -> Option<String> {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|t| output.status.success() && !t.is_empty())
}

/// Now, RFC 3339 in UTC with seconds.
pub fn utc_now() -> String {
    rfc3339(crate::workload::sys::realtime_ns() / 1_000_000_000)
}

/// Seconds since 1970 as RFC 3339 in UTC. Proleptic Gregorian, by the days-from-civil inverse.
pub fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years counted from 1 March 0000, so that the leap day ends a year.
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(rfc3339(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn machine_is_described() {
        assert!(
            kernel().starts_with(|c: char| c.is_ascii_digit()),
            "{}",
            kernel()
        );
        assert!(cpu().contains(" x "), "{}", cpu());
    }
}
