// SPDX-License-Identifier: GPL-2.0-or-later
//! Generic netlink: families of the kernel that are known by name.

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;

use super::wire::{c_string, push_attribute, unless, Attributes, Socket};

/// linux/genetlink.h: the family that knows the others.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// Length of `struct genlmsghdr`: attributes come after it.
pub(crate) const HEADER_LEN: usize = 4;

/// A family, by a socket of the network namespace of the thread that opened it.
pub(crate) struct GenericFamily {
    socket: Socket,
    id: u16,
}

/// The head of a message; attributes are pushed behind it.
pub(crate) fn body(command: u8, version: u8) -> Vec<u8> {
    vec![command, version, 0, 0]
}

impl GenericFamily {
    /// The family of this name, if it is there already. The kernel is asked for all families: asked for a name that it
    /// does not know, it runs modprobe and waits for it.
    pub(crate) fn find(name: &str) -> io::Result<Option<Self>> {
        let mut socket = Socket::open_for(NETLINK_GENERIC)?;
        let mut id = None;
        socket.dump(GENL_ID_CTRL, &body(CTRL_CMD_GETFAMILY, 1), |payload| {
            let family = Attributes::after(payload, HEADER_LEN);
            if family.string(CTRL_ATTR_FAMILY_NAME).as_deref() == Some(name) {
                id = family.u16(CTRL_ATTR_FAMILY_ID);
            }
        })?;
        Ok(id.map(|id| Self { socket, id }))
    }

    /// The family of this name. `None`: the kernel has none, and could not load one.
    pub(crate) fn open(name: &str) -> io::Result<Option<Self>> {
        let mut socket = Socket::open_for(NETLINK_GENERIC)?;
        let mut question = body(CTRL_CMD_GETFAMILY, 1);
        push_attribute(&mut question, CTRL_ATTR_FAMILY_NAME, &c_string(name));
        let answer = socket.request(GENL_ID_CTRL, 0, &question);
        let answer = unless(answer, &[libc::ENOENT])?.flatten();
        let id =
            Attributes::after(&answer.unwrap_or_default(), HEADER_LEN).u16(CTRL_ATTR_FAMILY_ID);
        Ok(id.map(|id| Self { socket, id }))
    }

    /// Has the kernel carry out one message.
    pub(crate) fn request(&mut self, body: &[u8]) -> io::Result<()> {
        self.socket.request(self.id, 0, body).map(|_| ())
    }

    /// Asks for one object; gives its message.
    pub(crate) fn ask(&mut self, body: &[u8]) -> io::Result<Vec<u8>> {
        let answer = self.socket.request(self.id, 0, body)?;
        Ok(answer.unwrap_or_default())
    }

    /// Asks for all objects; `each` gets their messages.
    pub(crate) fn dump(&mut self, body: &[u8], each: impl FnMut(&[u8])) -> io::Result<()> {
        self.socket.dump(self.id, body, each).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_family_of_families_is_there_and_others_are_not() {
        // Its own number, as the kernel gives it.
        let controller = GenericFamily::open("nlctrl").unwrap().unwrap();
        assert_eq!(controller.id, GENL_ID_CTRL);
        assert!(GenericFamily::open("mtn_no_such").unwrap().is_none());
        let found = GenericFamily::find("nlctrl").unwrap().unwrap();
        assert_eq!(found.id, GENL_ID_CTRL);
        // Of the whole name.
        for other in ["mtn_no_such", "nlctr", "nlctrl2", ""] {
            assert!(GenericFamily::find(other).unwrap().is_none(), "{other}");
        }
    }
}
