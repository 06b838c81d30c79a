// SPDX-License-Identifier: GPL-2.0-or-later
//! ip rules of a random host.

use super::dice::Dice;
use super::host::*;
use super::routes::Route;

/// The table that rules of further forms lead to.
const FORMS_TABLE: u32 = 150;

impl Host {
    pub fn add_rules(&mut self, dice: &mut Dice, ipv6: bool) {
        let tables = 100..100 + 1 + dice.below(3) as u32;
        for table in tables.clone() {
            let to = match dice.one_in(3) {
                true => prefix(dice.below(PREFIXES), ipv6),
                false => everywhere(ipv6),
            };
            let route = match dice.below(4) {
                0 => self.multipath(dice, to, table, 100),
                1 => {
                    let mut route = Route::new(to, table, 100, Vec::new());
                    route.kind = dice.pick(&["unreachable", "blackhole", "throw"]);
                    route
                }
                _ => {
                    let hop = self.hop(dice, ipv6);
                    Route::new(to, table, 100, vec![hop])
                }
            };
            self.routes.push(route);
        }
        let many = self.has(Kind::ManyRules);
        let count = if many { 70 } else { 1 + dice.below(4) };
        for n in 0..count {
            // Those that match nothing come first.
            let idle = many && n + 2 < count;
            let selector = match idle {
                true => format!("from {}", inner_address(100 + n as u16, false, false, ipv6)),
                false => self.selector(dice, ipv6),
            };
            let action = match dice.below(8) {
                0 if !idle => dice
                    .pick(&["unreachable", "blackhole", "prohibit"])
                    .to_owned(),
                1 if !idle => "lookup main suppress_prefixlength 0".to_owned(),
                _ => format!("lookup {}", 100 + dice.below(tables.len())),
            };
            let not = if dice.one_in(10) && !idle { "not " } else { "" };
            let order = 1000 + 10 * n;
            let rule = format!("rule add pref {order} {not}{selector} {action}");
            self.rules.push((ipv6, rule));
        }
    }

    /// The conditions of an ip rule.
    fn selector(&self, dice: &mut Dice, ipv6: bool) -> String {
        let bits = if ipv6 { 128 } else { 32 };
        let one = |dice: &mut Dice| match dice.below(10) {
            0 => format!("from {}/{bits}", service(ipv6)),
            1 => {
                let i = dice.below(self.uplinks.len());
                format!("from {}/{bits}", uplink_address(i, 1, ipv6))
            }
            2 => {
                let address = inner_address(0, dice.one_in(2), false, ipv6);
                format!("from {address}/{}", if ipv6 { 64 } else { 24 })
            }
            3 => format!("to {}", prefix(dice.below(PREFIXES), ipv6)),
            4 => format!("fwmark {:#x}", dice.pick(&MARKS[1..])),
            5 => format!("tos {:#x}", dice.pick(&TOSES[1..3])),
            6 => format!("iif {}", dice.pick(&["lo", INNER])),
            7 => format!("uidrange {USER}-{USER}"),
            8 => format!("ipproto {}", dice.pick(&["udp", "tcp"])),
            _ => match dice.one_in(2) {
                true => format!("sport {}", class_range(source_port(dice.below(CLASSES), 0))),
                false => format!("dport {}", any_destination_ports(dice)),
            },
        };
        let first = one(dice);
        let second = one(dice);
        let key = |text: &str| text.split(' ').next().unwrap().to_owned();
        match dice.one_in(4) && key(&first) != key(&second) {
            true => format!("{first} {second}"),
            false => first,
        }
    }

    /// Rules of forms that the others have not, before and between them, and a table that they lead to.
    pub fn add_rule_forms(&mut self, dice: &mut Dice) {
        for ipv6 in [false, true] {
            let everywhere = everywhere(ipv6);
            let route = match dice.one_in(2) {
                true => self.multipath(dice, everywhere, FORMS_TABLE, 100),
                false => {
                    let hop = self.hop(dice, ipv6);
                    Route::new(everywhere, FORMS_TABLE, 100, vec![hop])
                }
            };
            self.routes.push(route);
            for n in 0..1 + dice.below(3) {
                let selector = self.selector_form(dice, ipv6);
                let action = match dice.below(6) {
                    // That of the main table.
                    0 => "goto 32766".to_owned(),
                    1 => "lookup main suppress_prefixlength 8".to_owned(),
                    _ => format!("lookup {FORMS_TABLE}"),
                };
                let order = n + dice.pick(&[900, 1005]);
                let rule = format!("rule add pref {order} {selector} {action}");
                self.rules.push((ipv6, rule));
            }
        }
        self.set_onlink();
    }

    fn selector_form(&self, dice: &mut Dice, ipv6: bool) -> String {
        match dice.below(7) {
            0 => {
                let mark = dice.pick(&["0x1/0x3", "0x0/0x3", "0x100/0xff00"]);
                format!("fwmark {mark}")
            }
            1 => format!("oif {}", dice.pick(&self.uplinks).name),
            2 => {
                let proto = dice.pick(&["udp", "tcp"]);
                format!("ipproto {proto} dport {}", any_destination_ports(dice))
            }
            3 => format!("iif lo ipproto {}", dice.pick(&["udp", "tcp"])),
            4 => {
                let to = prefix(dice.below(PREFIXES), ipv6);
                format!("to {to} tos {:#x}", TOSES[1])
            }
            5 => format!("iif {INNER} fwmark {:#x}/0xff", dice.pick(&MARKS[..3])),
            // What source NAT gives, after routing.
            _ if !ipv6 => format!("from {TRANSLATED}/32"),
            _ => format!("from {RANGE6}"),
        }
    }
}
