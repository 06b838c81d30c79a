//! `mountain redirect` end to end: UDP and TCP through a router in namespaces of their own.

#[path = "redirect/net.rs"]
mod net;
mod support;

use net::{ask, ask_in_vain, ask_tcp, udp, Net, Place};

const RULE: &str = "--proto udp --from 10.0.8.17:8080";

#[test]
fn udp_goes_to_the_target_and_back_until_del() {
    let mut net = Net::new();
    net.serve(Place::Server, "server", "10.0.1.2:8083");
    let said = net.redirect(&format!("add {RULE} --to 10.0.1.2:8083"));
    assert_eq!(
        said,
        "rule 0: udp 10.0.8.17:8080 => 10.0.1.2:8083, by nft\n"
    );
    let socket = udp(&net.client, "10.0.8.18:0");
    let answer = ask(&socket, "10.0.8.17:8080", "hello");
    assert_eq!(
        answer,
        ("server hello".to_owned(), "10.0.8.17:8080".to_owned())
    );
    // Neither another port nor another protocol.
    ask_in_vain(&socket, "10.0.8.17:8081");
    assert!(ask_tcp(&net.client, "10.0.8.17:8080", "x").is_err());

    let list = net.json("list");
    let rule = &list["rules"][0];
    assert_eq!(rule["rule"]["from"], "10.0.8.17:8080");
    assert_eq!(rule["plan"]["backend"], "nft");
    assert_eq!(rule["active"], true);

    let said = net.redirect(&format!("del {RULE}"));
    assert!(said.starts_with("rule 0 is deleted: udp"), "{said}");
    // The same flow is no longer redirected, although it goes on.
    ask_in_vain(&socket, "10.0.8.17:8080");
    assert_eq!(net.rules(), 0);
    net.assert_clean();
    let error = net.refuses(&format!("del {RULE}"));
    assert!(
        error.contains("no rule redirects udp 10.0.8.17:8080"),
        "{error}"
    );
}
