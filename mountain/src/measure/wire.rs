// SPDX-License-Identifier: GPL-2.0-or-later
//! The packets that probes consist of: ICMP echo (RFC 792, RFC 4443) and the UDP probes that
//! `mountain reflect` answers. Pure encoding and decoding; all fields in network byte order.
//!
//! # UDP probe
//!
//! A request is at least [`PROBE_LEN`] bytes; what follows is padding. The reply has exactly the
//! request's length, so a forged source address gains nothing.
//!
//! | bytes | field |
//! |---|---|
//! | 0–3 | magic `MNTP` |
//! | 4 | version, 1 |
//! | 5 | kind: 1 request, 2 reply |
//! | 6 | reply: hop limit with which the request arrived, 0 unknown |
//! | 7 | reply: TOS / traffic class byte with which the request arrived |
//! | 8–15 | nonce, random per request, returned as it came |
//! | 16–23 | index, chosen by the sender, returned as it came |
//! | 24–31 | reply: T2, ns since the epoch by the reflector's clock, kernel receive stamp |
//! | 32–39 | reply: T3, ns by the same clock, read just before the reply is sent |
//! | 40–43 | reply: requests received from this address and port so far, this one included |
//! | 44–47 | reply: the client's cookie; request: the cookie of the last reply, 0 without one |
//!
//! In a request the other reply fields are 0. Versions other than 1 are not answered.
//!
//! Cookies need no new version. Earlier clients send 0 there and ignore what comes back; earlier reflectors
//! ignore the field and return it as it came.

use etherparse::checksum::Sum16BitWords;

/// UDP port of `mountain reflect` when none is named.
pub const DEFAULT_PORT: u16 = 8629;
/// Shortest UDP probe, bytes of payload.
pub const PROBE_LEN: usize = 48;
/// Offset of a UDP probe's cookie.
pub(crate) const COOKIE_AT: usize = 44;
/// Shortest echo message that holds nonce and index, ICMP header included.
pub(crate) const MIN_ECHO_LEN: usize = 8 + 16;

const MAGIC: [u8; 4] = *b"MNTP";
const VERSION: u8 = 1;
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

/// What identifies one probe in both kinds of packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeId {
    /// Random per probe, so that answers cannot be made up.
    pub nonce: u64,
    /// Number of the probe on its socket, for the look-up.
    pub index: u64,
}

/// What the reflector adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reflected {
    /// T2: the reflector's kernel receive stamp, ns by its clock.
    pub received_ns: u64,
    /// T3: the reflector's clock just before it sent, ns.
    pub sent_ns: u64,
    /// Requests it has received from our address and port, wrapping.
    pub count: u32,
    /// Hop limit with which the request arrived.
    pub hop_limit: Option<u8>,
    /// TOS / traffic class byte with which the request arrived.
    pub tos: u8,
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Writes a UDP request into `out`, whose length (at least [`PROBE_LEN`]) is the packet's. `cookie` is the
/// last reply's, 0 before the first.
pub fn write_request(out: &mut [u8], id: ProbeId, cookie: u32) {
    out.fill(0);
    out[..4].copy_from_slice(&MAGIC);
    out[4] = VERSION;
    out[5] = REQUEST;
    out[8..16].copy_from_slice(&id.nonce.to_be_bytes());
    out[16..24].copy_from_slice(&id.index.to_be_bytes());
    put_cookie(out, cookie);
}

fn put_cookie(packet: &mut [u8], cookie: u32) {
    packet[COOKIE_AT..][..4].copy_from_slice(&cookie.to_be_bytes());
}

/// The cookie of a UDP request or reply that was parsed.
pub fn cookie(packet: &[u8]) -> u32 {
    let bytes = packet[COOKIE_AT..][..4].try_into();
    u32::from_be_bytes(bytes.expect("four bytes"))
}

fn parse(packet: &[u8], kind: u8) -> Option<ProbeId> {
    (packet.len() >= PROBE_LEN && packet[..4] == MAGIC && packet[4] == VERSION && packet[5] == kind)
        .then(|| ProbeId {
            nonce: be64(packet, 8),
            index: be64(packet, 16),
        })
}

/// Reads a UDP request; `None` if it is none.
pub fn parse_request(packet: &[u8]) -> Option<ProbeId> {
    parse(packet, REQUEST)
}

/// Turns a request (as [`parse_request`] accepted it) into its reply, in place.
pub fn make_reply(packet: &mut [u8], reflected: Reflected, cookie: u32) {
    packet[5] = REPLY;
    packet[6] = reflected.hop_limit.unwrap_or(0);
    packet[7] = reflected.tos;
    packet[24..32].copy_from_slice(&reflected.received_ns.to_be_bytes());
    packet[32..40].copy_from_slice(&reflected.sent_ns.to_be_bytes());
    packet[40..44].copy_from_slice(&reflected.count.to_be_bytes());
    put_cookie(packet, cookie);
}

/// Reads a UDP reply; `None` if it is none.
pub fn parse_reply(packet: &[u8]) -> Option<(ProbeId, Reflected)> {
    let id = parse(packet, REPLY)?;
    let reflected = Reflected {
        received_ns: be64(packet, 24),
        sent_ns: be64(packet, 32),
        count: u32::from_be_bytes(packet[40..44].try_into().expect("four bytes")),
        hop_limit: (packet[6] != 0).then_some(packet[6]),
        tos: packet[7],
    };
    Some((id, reflected))
}

/// Writes an echo request into `packet`, whose length (at least [`MIN_ECHO_LEN`]) is the ICMP
/// message's. The kernel fills in the ICMPv6 checksum.
pub(crate) fn write_echo_request(packet: &mut [u8], ipv6: bool, ident: u16, id: ProbeId) {
    packet.fill(0);
    packet[0] = if ipv6 { 128 } else { 8 };
    packet[4..6].copy_from_slice(&ident.to_be_bytes());
    packet[6..8].copy_from_slice(&(id.index as u16).to_be_bytes());
    packet[8..16].copy_from_slice(&id.nonce.to_be_bytes());
    packet[16..24].copy_from_slice(&id.index.to_be_bytes());
    if !ipv6 {
        let sum = checksum(packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Reads an echo reply to `ident` as a raw socket delivers it: with the IP header for IPv4,
/// without for IPv6. `None` for anything else.
pub(crate) fn parse_echo_reply(ipv6: bool, packet: &[u8], ident: u16) -> Option<ProbeId> {
    let header = match (ipv6, packet.first()) {
        (true, _) => 0,
        (false, Some(first)) => usize::from(first & 0x0f) * 4,
        (false, None) => return None,
    };
    parse_echo_message(ipv6, packet.get(header..)?, ident)
}

/// Reads an echo reply without its IP header, as [`parse_echo_reply`].
pub(crate) fn parse_echo_message(ipv6: bool, icmp: &[u8], ident: u16) -> Option<ProbeId> {
    if icmp.len() < MIN_ECHO_LEN
        || icmp[0] != if ipv6 { 129 } else { 0 }
        || icmp[1] != 0
        || icmp[4..6] != ident.to_be_bytes()
    {
        return None;
    }
    // A raw IPv4 socket sees packets before anyone has looked at the ICMP checksum.
    if !ipv6 && checksum(icmp) != 0 {
        return None;
    }
    let id = ProbeId {
        nonce: be64(icmp, 8),
        index: be64(icmp, 16),
    };
    (icmp[6..8] == (id.index as u16).to_be_bytes()).then_some(id)
}

/// The Internet checksum (RFC 1071); 0 over data that contains a right one.
fn checksum(data: &[u8]) -> u16 {
    let sum = Sum16BitWords::new().add_slice(data);
    sum.ones_complement().to_be()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ProbeId = ProbeId {
        nonce: 0x0123_4567_89ab_cdef,
        index: 0x1_0002,
    };

    #[test]
    fn request_and_reply_round_trip_at_any_length() {
        for len in [PROBE_LEN, PROBE_LEN + 1, 1400] {
            let mut packet = vec![0xff; len];
            write_request(&mut packet, ID, 5);
            assert_eq!(parse_request(&packet), Some(ID));
            assert_eq!(cookie(&packet), 5);
            assert_eq!(parse_reply(&packet), None, "a request is no reply");
            let reflected = Reflected {
                received_ns: 1,
                sent_ns: u64::MAX,
                count: 7,
                hop_limit: Some(63),
                tos: 0xb8,
            };
            make_reply(&mut packet, reflected, 6);
            assert_eq!(cookie(&packet), 6);
            assert_eq!(packet.len(), len);
            assert_eq!(parse_reply(&packet), Some((ID, reflected)));
            let parsed = parse_request(&packet);
            assert_eq!(parsed, None, "a reply is not answered again");
        }
    }

    #[test]
    fn junk_is_no_probe() {
        let mut packet = [0; PROBE_LEN];
        write_request(&mut packet, ID, 0);
        assert_eq!(parse_request(&packet[..PROBE_LEN - 1]), None);
        assert_eq!(parse_request(&[]), None);
        for at in 0..6 {
            let mut bad = packet;
            bad[at] ^= 0x80;
            assert_eq!(parse_request(&bad), None, "byte {at}");
        }
    }

    fn echo_request(ipv6: bool, ident: u16, id: ProbeId) -> [u8; 56] {
        let mut packet = [0; 56];
        write_echo_request(&mut packet, ipv6, ident, id);
        packet
    }

    fn reply_v4(mut icmp: [u8; 56]) -> Vec<u8> {
        icmp[0] = 0;
        icmp[2..4].fill(0);
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut packet = vec![0x46; 24]; // with one word of IP options
        packet.extend(icmp);
        packet
    }

    #[test]
    fn echo_round_trip_and_rejects() {
        let request = echo_request(false, 77, ID);
        assert_eq!(checksum(&request), 0);
        let good = reply_v4(request);
        assert_eq!(parse_echo_reply(false, &good, 77), Some(ID));
        assert_eq!(parse_echo_reply(false, &good, 78), None, "another's id");
        assert_eq!(parse_echo_reply(false, &good[..47], 77), None, "truncated");
        assert_eq!(parse_echo_reply(false, &[], 77), None);
        let parsed = parse_echo_reply(false, &[0x4f; 20], 77);
        assert_eq!(parsed, None, "header past the end");
        let mut corrupt = good.clone();
        corrupt[40] ^= 1;
        assert_eq!(parse_echo_reply(false, &corrupt, 77), None, "checksum");
        let mut v6 = echo_request(true, 77, ID);
        assert_eq!(parse_echo_reply(true, &v6, 77), None, "a request");
        v6[0] = 129;
        assert_eq!(parse_echo_reply(true, &v6, 77), Some(ID));
        v6[7] ^= 1;
        assert_eq!(parse_echo_reply(true, &v6, 77), None, "sequence number");
    }

    #[test]
    fn checksum_matches_rfc_1071() {
        let words = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&words), !0xddf2);
        assert_eq!(checksum(&[0x01]), !0x0100);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_the_parsers_panic(bytes: Vec<u8>, ident: u16, ipv6: bool) {
            // Nobody guesses magic and version at random.
            assert_eq!(parse_request(&bytes), None);
            assert_eq!(parse_reply(&bytes), None);
            parse_echo_reply(ipv6, &bytes, ident);
        }

        #[test]
        fn a_probe_that_is_changed_anywhere_before_the_reply_fields_is_another(
            nonce: u64, index: u64, at in 0usize..24, flip in 1u8..,
        ) {
            let id = ProbeId { nonce, index };
            let mut packet = [0; PROBE_LEN];
            write_request(&mut packet, id, 0);
            packet[at] ^= flip;
            // Bytes 6 and 7 are the reply's.
            assert_eq!(parse_request(&packet) == Some(id), (6..8).contains(&at));
        }
    }
}
