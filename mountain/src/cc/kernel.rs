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
    if bbr_takes_other_sockets() {
        return Some((
            "the module tcp_bbr of this kernel describes `struct sock` anew (BTF), so the kernel lets no BPF \
             program call it",
            "use another build of this kernel: it is pahole that should have merged the two",
        ));
    }
    None
}

/// Whether the module's `bbr_main()` takes a socket of a type of the module's own. For the verifier that is
/// another type than the kernel's, whatever its name and members (`btf_types_are_same()` in
/// kernel/bpf/btf.c). Seen with Debian's 6.18.15-1~bpo13+1.
fn bbr_takes_other_sockets() -> bool {
    // SAFETY: both are live.
    let found = with_btf("tcp_bbr", |kernel, module| unsafe {
        first_parameter(module?, c"bbr_main").map(|id| id >= libbpf_sys::btf__type_cnt(kernel))
    });
    found.flatten().unwrap_or(false)
}

/// Id of the type that the first parameter of a function points to, qualifiers aside.
///
/// # Safety
/// `btf` is live.
unsafe fn first_parameter(btf: *const libbpf_sys::btf, function: &CStr) -> Option<u32> {
    let kind_of = |info: u32| info >> 24 & 0x1f;
    let type_of = |id| {
        // SAFETY: null where there is no such type.
        let found = unsafe { libbpf_sys::btf__type_by_id(btf, id) };
        (!found.is_null()).then_some(found)
    };
    // SAFETY: a live BTF and a string that ends in NUL; what comes of it are types of this BTF, and a
    // prototype's parameters follow it, as many as the low half of `info` says.
    unsafe {
        let id =
            libbpf_sys::btf__find_by_name_kind(btf, function.as_ptr(), libbpf_sys::BTF_KIND_FUNC);
        let id = u32::try_from(id).ok().filter(|id| *id > 0)?;
        let prototype = type_of((*type_of(id)?).__bindgen_anon_1.type_)?;
        if (*prototype).info & 0xffff == 0 {
            return None;
        }
        let parameter = prototype.add(1).cast::<libbpf_sys::btf_param>();
        let mut id = (*parameter).type_;
        loop {
            let found = type_of(id)?;
            match kind_of((*found).info) {
                libbpf_sys::BTF_KIND_PTR
                | libbpf_sys::BTF_KIND_CONST
                | libbpf_sys::BTF_KIND_VOLATILE
                | libbpf_sys::BTF_KIND_RESTRICT
                | libbpf_sys::BTF_KIND_TYPE_TAG => id = (*found).__bindgen_anon_1.type_,
                _ => return Some(id),
            }
        }
    }
}

/// Has a look at the types of the kernel, and of a module where that is loaded; `None`: the kernel does not
/// describe its types.
fn with_btf<T>(
    module: &str,
    look: impl FnOnce(*mut libbpf_sys::btf, Option<*mut libbpf_sys::btf>) -> T,
) -> Option<T> {
    let module = CString::new(module).ok()?;
    // SAFETY: null or a BTF that is ours to free; the module's refers to the kernel's, which is
    // freed after it.
    unsafe {
        let kernel = libbpf_sys::btf__load_vmlinux_btf();
        if kernel.is_null() {
            return None;
        }
        let split = libbpf_sys::btf__load_module_btf(module.as_ptr(), kernel);
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
    let name = CString::new(name).ok()?;
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
    with_btf(module, |kernel, split| {
        members(kernel).or_else(|| members(split?))
    })?
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
