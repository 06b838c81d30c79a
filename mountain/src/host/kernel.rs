// SPDX-License-Identifier: GPL-2.0-or-later
//! The version of the running kernel, and where a newer one comes from.

/// Oldest kernel with tcx, the hook the steering program is attached to.
pub(crate) const OLDEST: (u32, u32) = (6, 6);

/// Major and minor of a release such as `6.12.48+deb13-amd64`.
pub(crate) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}

/// What to do about a kernel that is older than [`OLDEST`]. `os_release`: see os-release(5); `arch`: as in
/// [`std::env::consts::ARCH`].
pub(crate) fn how_to_get_newer(os_release: &str, arch: &str) -> String {
    let value = |key: &str| {
        let mut lines = os_release.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        value.unwrap_or_default().trim_matches(['"', '\''])
    };
    let is_debian_12 = (value("ID"), value("VERSION_ID")) == ("debian", "12");
    match debian_flavour(arch).filter(|_| is_debian_12) {
        Some(flavour) => format!(
            "enable bookworm-backports (https://backports.debian.org/Instructions/), then `apt install -t \
             bookworm-backports linux-image-{flavour}`, and reboot"
        ),
        None => {
            let (major, minor) = OLDEST;
            format!("install Linux {major}.{minor} or newer, and reboot")
        }
    }
}

/// What the name of Debian 12's kernel package ends with.
fn debian_flavour(arch: &str) -> Option<&'static str> {
    Some(match arch {
        "x86_64" => "amd64",
        "x86" => "686-pae",
        "aarch64" => "arm64",
        "arm" => "armmp",
        "powerpc64" => "powerpc64le",
        "s390x" => "s390x",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_kernel_is_advised_by_system_and_architecture() {
        let bookworm =
            "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_ID=\"12\"\nID=debian\n";
        for (arch, package) in [
            ("x86_64", "linux-image-amd64`"),
            ("aarch64", "linux-image-arm64`"),
        ] {
            let text = how_to_get_newer(bookworm, arch);
            assert!(text.starts_with("enable bookworm-backports"), "{text}");
            assert!(text.contains(package), "{text}");
        }
        // No package, or not Debian's.
        let mint = "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\nVERSION_ID=\"12\"\n";
        let trixie = "ID=debian\nVERSION_ID=\"13\"\n";
        for (os_release, arch) in [
            (bookworm, "sparc64"),
            (mint, "x86_64"),
            (trixie, "x86_64"),
            ("", "x86_64"),
        ] {
            let text = how_to_get_newer(os_release, arch);
            assert_eq!(text, "install Linux 6.6 or newer, and reboot");
        }
    }

    #[test]
    fn releases_of_distributions_are_understood() {
        assert_eq!(version("6.12.48+deb13-amd64"), Some((6, 12)));
        assert_eq!(version("6.6-rc1"), Some((6, 6)));
        assert_eq!(version("linux"), None);
        assert!(version("6.1.0-13-amd64").unwrap() < OLDEST);
    }
}
