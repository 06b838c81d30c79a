//! What the congestion control needs of the kernel.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::process::{Command, Stdio};

use libbpf_rs::btf::{types, Btf};

/// What is missing here and what to do about it, as a sentence; `None` when it should work.
///
/// Where BBR is a module it is loaded: libbpf looks for its functions among what is there.
pub fn missing() -> Option<String> {
    if load_bbr() {
        return None;
    }
    lacking().map(|(what, todo)| format!("{what}: {todo}"))
}

/// What is missing here, and what to do about it. Changes nothing: a module of BBR that could be
/// loaded is enough.
pub fn lacking() -> Option<(&'static str, &'static str)> {
    let Ok(btf) = Btf::from_vmlinux() else {
        return Some((
            "the kernel does not describe its types (/sys/kernel/btf/vmlinux is missing)",
            "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount /sys",
        ));
    };
    let ops = "bpf_struct_ops_tcp_congestion_ops";
    if btf.type_by_name::<types::Struct<'_>>(ops).is_none() {
        return Some((
            "the kernel takes no congestion control from BPF",
            "use Linux 6.12 or newer with CONFIG_BPF_SYSCALL=y and CONFIG_BPF_JIT=y",
        ));
    }
    if !has_bbr(&btf) && !bbr_is_loaded() && !modprobe(&["--dry-run"]) {
        return Some((
            "the kernel has no BBR",
            "install the module tcp_bbr, or use a kernel with CONFIG_TCP_CONG_BBR=y",
        ));
    }
    if bbr_is_another() {
        return Some((
            "the kernel's BBR is not version 1, which the brake is made for",
            "use a kernel whose tcp_bbr is that of kernel.org",
        ));
    }
    None
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
    match struct_members("tcp_bbr", "bbr") {
        Some(members) => {
            let has = |name: &str| members.iter().any(|m| m == name);
            !V1.into_iter().all(has) || has("bw_lo")
        }
        None => false,
    }
}

/// Names of the members of a structure of the kernel, or of a module of it where the kernel has it
/// not; `None`: neither has it.
fn struct_members(module: &str, name: &str) -> Option<Vec<String>> {
    let (module, name) = (CString::new(module).ok()?, CString::new(name).ok()?);
    let text = |btf, offset| {
        // SAFETY: a live BTF, which owns the string; null where the offset is none of it.
        let text = unsafe { libbpf_sys::btf__name_by_offset(btf, offset) };
        // SAFETY: not null, and libbpf has checked that it ends in NUL.
        (!text.is_null()).then(|| {
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        })
    };
    let members = |btf: *mut libbpf_sys::btf| {
        // SAFETY: a live BTF and a string that ends in NUL.
        let id = unsafe {
            libbpf_sys::btf__find_by_name_kind(btf, name.as_ptr(), libbpf_sys::BTF_KIND_STRUCT)
        };
        let id = u32::try_from(id).ok().filter(|id| *id > 0)?;
        // SAFETY: an id of this BTF; its members, as many as the low half of `info` says, follow.
        let members = unsafe {
            let kind = libbpf_sys::btf__type_by_id(btf, id);
            let count = ((*kind).info & 0xffff) as usize;
            let first = kind.add(1).cast::<libbpf_sys::btf_member>();
            std::slice::from_raw_parts(first, count)
        };
        Some(
            members
                .iter()
                .filter_map(|m| text(btf, m.name_off))
                .collect(),
        )
    };
    // SAFETY: null or a BTF that is ours to free; the module's refers to the kernel's, which is
    // freed after it.
    unsafe {
        let kernel = libbpf_sys::btf__load_vmlinux_btf();
        if kernel.is_null() {
            return None;
        }
        let mut found = members(kernel);
        if found.is_none() {
            let split = libbpf_sys::btf__load_module_btf(module.as_ptr(), kernel);
            if !split.is_null() {
                found = members(split);
                libbpf_sys::btf__free(split);
            }
        }
        libbpf_sys::btf__free(kernel);
        found
    }
}

fn has_bbr(btf: &Btf<'_>) -> bool {
    btf.type_by_name::<types::Func<'_>>("bbr_main").is_some()
}

fn bbr_is_loaded() -> bool {
    Path::new("/sys/kernel/btf/tcp_bbr").exists()
}

/// Makes the kernel load BBR's module, if it is one; whether BBR and all else is there now.
fn load_bbr() -> bool {
    match Btf::from_vmlinux() {
        Ok(btf) if !has_bbr(&btf) && !bbr_is_loaded() => {
            modprobe(&[]);
            bbr_is_loaded() && lacking().is_none()
        }
        _ => lacking().is_none(),
    }
}

fn modprobe(options: &[&str]) -> bool {
    let mut command = Command::new("modprobe");
    command.args(options).arg("tcp_bbr").stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Whether `cwnd_event_tx_start` has replaced `cwnd_event` (Linux 7.3).
pub fn has_tx_start() -> bool {
    let Ok(btf) = Btf::from_vmlinux() else {
        return false;
    };
    let ops = btf.type_by_name::<types::Struct<'_>>("tcp_congestion_ops");
    ops.is_some_and(|ops| {
        ops.iter()
            .any(|member| member.name.is_some_and(|n| n == "cwnd_event_tx_start"))
    })
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
    fn bbr_is_told_by_its_members() {
        assert!(!bbr_is_another());
        let members = struct_members("tcp_bbr", "bbr").unwrap();
        assert!(members.contains(&"lt_use_bw".to_owned()), "{members:?}");
        assert!(!members.contains(&"bw_lo".to_owned()), "{members:?}");
        // Of the kernel's, one that is larger and one that is not there.
        let socket = struct_members("tcp_bbr", "tcp_sock").unwrap();
        assert!(socket.contains(&"snd_cwnd".to_owned()) && socket.len() > 50);
        assert_eq!(struct_members("tcp_bbr", "mtn_nonesuch"), None);
    }
}
