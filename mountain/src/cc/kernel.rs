//! What the congestion control needs of the kernel.

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
    None
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
}
