// SPDX-License-Identifier: GPL-2.0-or-later
//! Other programs that Mountain starts: a missing one is named, with the package that has it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Programs that Mountain and its lab use, and their Debian packages. What a user names may be anything.
const PACKAGES: [(&str, &str); 11] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("ping", "iputils-ping"),
    ("irtt", "irtt"),
    ("ethtool", "ethtool"),
    ("nsenter", "util-linux"),
    ("unshare", "util-linux"),
    ("taskset", "util-linux"),
    ("sysctl", "procps"),
    ("modprobe", "kmod"),
];

/// Where system programs are. The PATH of a user, which `su` without `-` keeps, has no folder named `sbin`.
const SYSTEM_FOLDERS: [&str; 5] = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// A program is in none of the folders of `$PATH`, or nothing that can be executed is at its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    program: String,
}

impl Missing {
    /// The error for `program`, once starting it has failed with "not found".
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        Missing {
            program: program.as_ref().to_string_lossy().into_owned(),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = &self.program;
        match PACKAGES.iter().find(|(name, _)| name == program) {
            Some((_, package)) => write!(
                f,
                "{program} is not installed: run \"apt install {package}\" (on Debian), \
                 or \"sudo scripts/setup\" in the source tree"
            ),
            None => write!(
                f,
                "there is no program {program}: write a name in $PATH or the path of an executable file; \
                 shell words go into sh -c '...'"
            ),
        }
    }
}

impl std::error::Error for Missing {}

/// Appends the folders of system programs to `$PATH`, for this process and those that it starts. Call it before there
/// are other threads, which might read the environment.
pub fn complete_path() {
    env::set_var("PATH", completed(env::var_os("PATH").as_deref()));
}

fn completed(path: Option<&OsStr>) -> OsString {
    let mut all = path.unwrap_or_default().to_owned();
    for folder in SYSTEM_FOLDERS {
        if env::split_paths(&all).any(|known| known == Path::new(folder)) {
            continue;
        }
        if !all.is_empty() {
            all.push(":");
        }
        all.push(folder);
    }
    all
}

/// Where a program is: itself if its name has a slash, else in the first folder of `$PATH` that
/// has an executable file of that name.
///
/// # Errors
/// [`Missing`] if there is none.
pub fn find(program: impl AsRef<OsStr>) -> Result<PathBuf, Missing> {
    find_in(program.as_ref(), env::var_os("PATH").as_deref())
}

fn find_in(program: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, Missing> {
    let runs = |file: &Path| {
        file.metadata()
            .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    let direct = Path::new(program);
    if direct.components().count() > 1 {
        return match runs(direct) {
            true => Ok(direct.to_owned()),
            false => Err(Missing::new(program)),
        };
    }
    path.into_iter()
        .flat_map(env::split_paths)
        .map(|folder| folder.join(program))
        .find(|file| runs(file))
        .ok_or_else(|| Missing::new(program))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_gets_the_folders_that_it_lacks() {
        let completed = |path: Option<&str>| completed(path.map(OsStr::new));
        let all = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin";
        for empty in [None, Some("")] {
            assert_eq!(completed(empty), all);
        }
        let user = completed(Some("/home/me/bin:/usr/bin:/bin"));
        let expected = "/home/me/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";
        assert_eq!(user, expected);
        assert_eq!(completed(Some(all)), all);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ping");
        let path = folder.path().as_os_str();
        let missing = find_in(OsStr::new("ping"), Some(path)).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "ping is not installed: run \"apt install iputils-ping\" (on Debian), \
             or \"sudo scripts/setup\" in the source tree"
        );
        // A file that cannot be executed is no program.
        std::fs::write(&file, "").unwrap();
        assert!(find_in(OsStr::new("ping"), Some(path)).is_err());
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find_in(OsStr::new("ping"), Some(path)).unwrap(), file);
        assert_eq!(find_in(file.as_os_str(), None).unwrap(), file);
        // No package has what a user has mistyped.
        for named in ["./ping", "no-such", "FOO=1", "/etc/passwd", "/bin"] {
            let missing = find(named).unwrap_err().to_string();
            let start = format!("there is no program {named}: ");
            assert!(missing.starts_with(&start), "{missing}");
        }
    }
}
