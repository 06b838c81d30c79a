// SPDX-License-Identifier: GPL-2.0-or-later
//! What the congestion control needs of the kernel.

use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::host::program::{self, Missing};
use crate::host::sysctl;

/// What is missing here and what to do about it, as a sentence; `None` when it should work.
///
/// Where BBR is a module it is loaded: libbpf looks for its functions among what is there.
pub(crate) fn missing() -> Option<String> {
    let loaded = load_bbr();
    sentence(lacking(), loaded)
}

/// What is `lacking`, or else why BBR could not be `loaded`, as a sentence.
fn sentence(lacking: Option<(&str, &str)>, loaded: Result<(), String>) -> Option<String> {
    if let Some((what, todo)) = lacking {
        return Some(format!("{what}: {todo}"));
    }
    loaded.err().map(|why| {
        format!(
            "the module tcp_bbr cannot be loaded ({why}): see `dmesg`, and what is said of tcp_bbr in \
             /etc/modprobe.d"
        )
    })
}

/// What is missing here, and what to do about it. Changes nothing: a module of BBR that looks as if it
/// could be loaded is enough. Whether it can, [`missing`] knows.
pub(crate) fn lacking() -> Option<(&'static str, &'static str)> {
    let ops = c"bpf_struct_ops_tcp_congestion_ops";
    // SAFETY: live.
    let ops = |btf| unsafe { type_id(btf, ops, libbpf_sys::BTF_KIND_STRUCT) };
    let Some(ops) = with_btf(|kernel, _| ops(kernel)) else {
        return Some((
            "the kernel does not describe its types (/sys/kernel/btf/vmlinux is missing)",
            "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys",
        ));
    };
    if ops.is_none() {
        return Some((
            "the kernel takes no congestion control from BPF",
            "use Linux 6.12 or newer with CONFIG_BPF_SYSCALL=y and CONFIG_BPF_JIT=y",
        ));
    }
    // `cong_control(sk, ack, flag, rs)` since 6.10, `(sk, rs)` before.
    if cong_control_parameters() != Some(4) {
        return Some((
            "the kernel tells its congestion controls too little of an ACK",
            "use Linux 6.12 or newer",
        ));
    }
    if is_locked_down(&fs::read_to_string(LOCKDOWN).unwrap_or_default()) {
        return Some((
            "the kernel is locked down (confidentiality), so that no BPF program may read its memory",
            "start it with `lockdown=integrity`",
        ));
    }
    if is_to_be_loaded() {
        // Nothing but a restart takes it back. Kernels without modules have no such file.
        if sysctl::number("kernel/modules_disabled") == Some(1) {
            return Some((
                "BBR is a module that is not loaded, and the kernel loads none any more \
                 (kernel.modules_disabled)",
                "start the machine anew with tcp_bbr in /etc/modules-load.d",
            ));
        }
        if let Some(why) = unloadable(program::find("modprobe")) {
            return Some(why);
        }
    }
    if bbr_is_another() {
        return Some((
            "the kernel's BBR is not version 1, which the brake is made for",
            "use a kernel whose tcp_bbr is that of kernel.org",
        ));
    }
    if bbr_takes_other_sockets() {
        return Some((
            "the module tcp_bbr of this kernel describes `struct sock` anew (BTF), so the kernel lets no BPF \
             program call it",
            "use another build of this kernel: it is pahole that should have merged the two",
        ));
    }
    None
}

/// kernel_lockdown(7).
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// Whether `none integrity [confidentiality]` is the last of these.
fn is_locked_down(levels: &str) -> bool {
    levels.contains("[confidentiality]")
}

/// How many parameters the kernel calls `cong_control()` of a congestion control with; `None`: there is no such callback.
fn cong_control_parameters() -> Option<u32> {
    let found = with_btf(|kernel, _| {
        let (at, id) = struct_fields(kernel, c"tcp_congestion_ops")?;
        let at = at.iter().position(|name| name == "cong_control")?;
        // SAFETY: live, and ids of it.
        unsafe {
            let prototype = type_by_id(kernel, pointed_to(kernel, id[at])?)?;
            Some((*prototype).info & 0xffff)
        }
    });
    found.flatten()
}

/// Why BBR, which is not in the kernel yet, is not there to be loaded by this program.
fn unloadable(modprobe: Result<PathBuf, Missing>) -> Option<(&'static str, &'static str)> {
    let Ok(modprobe) = modprobe else {
        return Some((
            "BBR is not in the kernel yet, and modprobe, which loads modules, is not installed",
            "install kmod; in a container, run `modprobe tcp_bbr` on its host",
        ));
    };
    let tried = succeeds(Command::new(modprobe).args(["--dry-run", "tcp_bbr"]));
    tried.is_err().then_some((
        "the kernel has no BBR",
        "install the module tcp_bbr, or use a kernel with CONFIG_TCP_CONG_BBR=y; in a container, run \
         `modprobe tcp_bbr` on its host",
    ))
}

/// Whether the module's `bbr_main()` takes a socket of a type of the module's own. For the verifier that is
/// another type than the kernel's, whatever its name and members (`btf_types_are_same()` in
/// kernel/bpf/btf.c). Seen with Debian's 6.18.15-1~bpo13+1.
fn bbr_takes_other_sockets() -> bool {
    // SAFETY: both are live.
    let found = with_btf(|kernel, module| unsafe {
        first_parameter(module?, c"bbr_main").map(|id| id >= libbpf_sys::btf__type_cnt(kernel))
    });
    found.flatten().unwrap_or(false)
}

/// Id of the type of a name and kind.
///
/// # Safety
/// `btf` is live.
unsafe fn type_id(btf: *const libbpf_sys::btf, name: &CStr, kind: u32) -> Option<u32> {
    // SAFETY: a live BTF and a string that ends in NUL.
    let id = unsafe { libbpf_sys::btf__find_by_name_kind(btf, name.as_ptr(), kind) };
    u32::try_from(id).ok().filter(|id| *id > 0)
}

/// Id of the type that the first parameter of a function points to, qualifiers aside.
///
/// # Safety
/// `btf` is live.
unsafe fn first_parameter(btf: *const libbpf_sys::btf, function: &CStr) -> Option<u32> {
    // SAFETY: a live BTF; what comes of it are types of this BTF, and a prototype's parameters follow it, as
    // many as the low half of `info` says.
    unsafe {
        let id = type_id(btf, function, libbpf_sys::BTF_KIND_FUNC)?;
        let prototype = type_by_id(btf, (*type_by_id(btf, id)?).__bindgen_anon_1.type_)?;
        if (*prototype).info & 0xffff == 0 {
            return None;
        }
        let parameter = prototype.add(1).cast::<libbpf_sys::btf_param>();
        pointed_to(btf, (*parameter).type_)
    }
}

/// # Safety
/// `btf` is live.
unsafe fn type_by_id(btf: *const libbpf_sys::btf, id: u32) -> Option<*const libbpf_sys::btf_type> {
    // SAFETY: null where there is no such type.
    let found = unsafe { libbpf_sys::btf__type_by_id(btf, id) };
    (!found.is_null()).then_some(found)
}

/// What a type is without pointers and qualifiers.
///
/// # Safety
/// `btf` is live.
unsafe fn pointed_to(btf: *const libbpf_sys::btf, mut id: u32) -> Option<u32> {
    loop {
        // SAFETY: a live BTF, whose types these are.
        let found = unsafe { &*type_by_id(btf, id)? };
        match found.info >> 24 & 0x1f {
            libbpf_sys::BTF_KIND_PTR
            | libbpf_sys::BTF_KIND_CONST
            | libbpf_sys::BTF_KIND_VOLATILE
            | libbpf_sys::BTF_KIND_RESTRICT
            // SAFETY: these have a type.
            | libbpf_sys::BTF_KIND_TYPE_TAG => id = unsafe { found.__bindgen_anon_1.type_ },
            _ => return Some(id),
        }
    }
}

/// Has a look at the types of the kernel, and of BBR's module where that is loaded; `None`: the kernel does
/// not describe its types.
fn with_btf<T>(
    look: impl FnOnce(*mut libbpf_sys::btf, Option<*mut libbpf_sys::btf>) -> T,
) -> Option<T> {
    // SAFETY: null or a BTF that is ours to free; the module's refers to the kernel's, which is
    // freed after it.
    unsafe {
        let kernel = libbpf_sys::btf__load_vmlinux_btf();
        if kernel.is_null() {
            return None;
        }
        let split = libbpf_sys::btf__load_module_btf(c"tcp_bbr".as_ptr(), kernel);
        let found = look(kernel, (!split.is_null()).then_some(split));
        libbpf_sys::btf__free(split);
        libbpf_sys::btf__free(kernel);
        Some(found)
    }
}

/// Whether the BBR that is there, built in or loaded, is of another version: BBRv3, which some
/// distributions ship under the same name, keeps other things under other names. A module that is
/// not loaded cannot be asked yet.
fn bbr_is_another() -> bool {
    const V1: [&str; 6] = [
        "min_rtt_us",
        "bw",
        "mode",
        "lt_use_bw",
        "pacing_gain",
        "full_bw_reached",
    ];
    struct_members(c"bbr").is_some_and(|members| {
        let has = |name: &str| members.iter().any(|m| m == name);
        !V1.into_iter().all(has) || has("bw_lo")
    })
}

/// Names of the members of a structure of the kernel, or of BBR's module where the kernel has it
/// not; `None`: neither has it.
fn struct_members(name: &CStr) -> Option<Vec<String>> {
    let names = |btf| struct_fields(btf, name).map(|(names, _)| names);
    with_btf(|kernel, split| names(kernel).or_else(|| names(split?)))?
}

/// Names of the members of a structure, and ids of their types.
fn struct_fields(btf: *mut libbpf_sys::btf, name: &CStr) -> Option<(Vec<String>, Vec<u32>)> {
    let text = |offset| {
        // SAFETY: a live BTF, which owns the string; null where the offset is none of it.
        let text = unsafe { libbpf_sys::btf__name_by_offset(btf, offset) };
        // SAFETY: not null, and libbpf has checked that it ends in NUL.
        (!text.is_null()).then(|| {
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        })
    };
    // SAFETY: a live BTF, and an id of it; the members, as many as the low half of `info` says, follow.
    let members = unsafe {
        let id = type_id(btf, name, libbpf_sys::BTF_KIND_STRUCT)?;
        let kind = libbpf_sys::btf__type_by_id(btf, id);
        let count = ((*kind).info & 0xffff) as usize;
        let first = kind.add(1).cast::<libbpf_sys::btf_member>();
        std::slice::from_raw_parts(first, count)
    };
    let fields = members
        .iter()
        .filter_map(|m| Some((text(m.name_off)?, m.type_)));
    Some(fields.unzip())
}

/// Whether BBR is neither built in nor loaded: a module yet to be loaded, or nothing at all. Not where the
/// kernel does not describe its types.
pub(crate) fn is_to_be_loaded() -> bool {
    // SAFETY: live.
    let bbr = |btf| unsafe { type_id(btf, c"bbr_main", libbpf_sys::BTF_KIND_FUNC) };
    with_btf(|kernel, _| bbr(kernel)) == Some(None) && !bbr_is_loaded()
}

fn bbr_is_loaded() -> bool {
    Path::new("/sys/kernel/btf/tcp_bbr").exists()
}

/// Makes the kernel load BBR's module, if it is one.
fn load_bbr() -> Result<(), String> {
    if !is_to_be_loaded() {
        return Ok(());
    }
    let modprobe = succeeds(Command::new("modprobe").arg("tcp_bbr"));
    came_of(modprobe, bbr_is_loaded())
}

/// What came of `modprobe`, after which the module is loaded or not. `install tcp_bbr /bin/true` in its
/// configuration is a success that loads nothing; and what modprobe complains of may yet have worked.
fn came_of(modprobe: Result<(), String>, is_loaded: bool) -> Result<(), String> {
    match modprobe {
        _ if is_loaded => Ok(()),
        Ok(()) => Err("modprobe does not fail, but there is no /sys/kernel/btf/tcp_bbr".into()),
        failed => failed,
    }
}

/// Runs a command to its end.
///
/// # Errors
/// What it says, on one line, or how it ended if it says nothing.
fn succeeds(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("cannot run {program}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().map(str::trim).collect::<Vec<_>>().join("; ");
    Err(match said.is_empty() {
        true => format!("{program}: {}", output.status),
        false => said,
    })
}

/// Whether `cwnd_event_tx_start` has replaced `cwnd_event` (Linux 7.3).
pub(crate) fn has_tx_start() -> bool {
    let members = struct_members(c"tcp_congestion_ops");
    members.is_some_and(|all| all.iter().any(|name| name == "cwnd_event_tx_start"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests need such a kernel anyway.
    #[test]
    fn this_kernel_is_able() {
        assert_eq!(lacking(), None);
        assert_eq!(missing(), None);
    }

    #[test]
    fn a_module_that_is_missing_is_told_from_a_missing_modprobe() {
        let (what, todo) = unloadable(Err(Missing::new("modprobe"))).unwrap();
        assert!(what.contains("modprobe") && todo.contains("kmod"), "{what}");
        let (what, todo) = unloadable(program::find("false")).unwrap();
        assert!(what.contains("no BBR"), "{what}");
        assert!(todo.contains("tcp_bbr"), "{todo}");
        assert_eq!(unloadable(program::find("true")), None);
    }

    /// What `modprobe --dry-run` finds may fail to load all the same.
    #[test]
    fn a_module_that_is_not_there_after_loading_it_is_missing() {
        let refused = "modprobe: ERROR: could not insert 'tcp_bbr': Key was rejected by service";
        let shell = |script: &str| succeeds(Command::new("sh").args(["-c", script]));
        let failed = shell(&format!("echo \"{refused}\" >&2; exit 1"));
        assert_eq!(failed, Err(refused.to_owned()));
        let told = sentence(None, came_of(failed.clone(), false)).unwrap();
        testkit::assert_has(&told, &["tcp_bbr cannot be loaded", refused]);
        // Somebody else has loaded it meanwhile.
        assert_eq!(sentence(None, came_of(failed.clone(), true)), None);
        let silent = sentence(None, came_of(shell("exit 3"), false)).unwrap();
        assert!(silent.contains("sh: exit status: 3"), "{silent}");
        let nothing_done = sentence(None, came_of(shell("exit 0"), false)).unwrap();
        testkit::assert_has(&nothing_done, &["/sys/kernel/btf/tcp_bbr"]);
        assert_eq!(sentence(None, came_of(Ok(()), true)), None);
        // What is known to be lacking says more.
        let lacking = Some(("no BBR", "install it"));
        assert_eq!(sentence(lacking, failed), Some("no BBR: install it".into()));
        let error = succeeds(&mut Command::new("/nonesuch/modprobe")).unwrap_err();
        let cannot = "cannot run /nonesuch/modprobe: ";
        assert!(error.starts_with(cannot), "{error}");
    }

    /// A module that refers to the kernel's `struct sock`, and one that has its own.
    #[test]
    fn a_function_that_takes_a_type_of_the_modules_own_is_told() {
        for own in [false, true] {
            // SAFETY: BTFs that are made here, and freed in order; names end in NUL.
            unsafe {
                let kernel = libbpf_sys::btf__new_empty();
                let mut sock = libbpf_sys::btf__add_struct(kernel, c"sock".as_ptr(), 8);
                let module = libbpf_sys::btf__new_empty_split(kernel);
                if own {
                    sock = libbpf_sys::btf__add_struct(module, c"sock".as_ptr(), 8);
                }
                let pointer = libbpf_sys::btf__add_ptr(module, sock);
                let prototype = libbpf_sys::btf__add_func_proto(module, 0);
                libbpf_sys::btf__add_func_param(module, c"sk".as_ptr(), pointer);
                let name = c"bbr_main";
                let linkage = libbpf_sys::BTF_FUNC_STATIC;
                libbpf_sys::btf__add_func(module, name.as_ptr(), linkage, prototype);
                let found = first_parameter(module, name);
                assert_eq!(found, u32::try_from(sock).ok());
                assert_eq!(found >= Some(libbpf_sys::btf__type_cnt(kernel)), own);
                assert_eq!(first_parameter(module, c"bbr_init"), None);
                libbpf_sys::btf__free(module);
                libbpf_sys::btf__free(kernel);
            }
        }
        assert!(!bbr_takes_other_sockets());
    }

    #[test]
    fn what_older_and_locked_kernels_lack_is_told() {
        assert_eq!(cong_control_parameters(), Some(4));
        assert!(is_locked_down("none integrity [confidentiality]\n"));
        assert!(!is_locked_down("none [integrity] confidentiality\n"));
        assert!(!is_locked_down(""));
    }

    #[test]
    fn bbr_is_told_by_its_members() {
        assert!(!bbr_is_another());
        let members = struct_members(c"bbr").unwrap();
        assert!(members.contains(&"lt_use_bw".to_owned()), "{members:?}");
        assert!(!members.contains(&"bw_lo".to_owned()), "{members:?}");
        // Of the kernel's, one that is larger and one that is not there.
        let socket = struct_members(c"tcp_sock").unwrap();
        assert!(socket.contains(&"snd_cwnd".to_owned()) && socket.len() > 50);
        assert_eq!(struct_members(c"mtn_nonesuch"), None);
    }
}
