// SPDX-License-Identifier: GPL-2.0-or-later
//! The version of the running kernel.

/// Oldest kernel with tcx, the hook the steering program is attached to.
pub(crate) const OLDEST: (u32, u32) = (6, 6);

/// Major and minor of a release such as `6.12.48+deb13-amd64`.
pub(crate) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_distributions_are_understood() {
        assert_eq!(version("6.12.48+deb13-amd64"), Some((6, 12)));
        assert_eq!(version("6.6-rc1"), Some((6, 6)));
        assert_eq!(version("linux"), None);
        assert!(version("6.1.0-13-amd64").unwrap() < OLDEST);
    }
}
