// SPDX-License-Identifier: GPL-2.0-or-later
//! Real programs through the backends: iperf3, a DNS server asked by dig, nginx asked by curl, and a
//! GiB by TCP.

use std::path::Path;

use crate::net::{Net, BACKENDS};
use crate::support::stream::transfer;
use crate::support::{stderr, wait_until, Guard, DNSMASQ, LEAVE};
use serde_json::Value;

const FROM: &str = "10.0.8.17";
const TO: &str = "10.0.1.2";
/// Bytes: many times what socket buffers hold.
const LONG: u64 = 1 << 28;

/// Adds the rules of `ports` (from, to) by a backend.
fn redirect(net: &Net, backend: &str, protos: &[&str], ports: (u16, u16)) {
    let (from, to) = (format!("{FROM}:{}", ports.0), format!("{TO}:{}", ports.1));
    for proto in protos {
        net.add(proto, &from, &to, backend);
    }
}

#[test]
fn iperf3_tcp_and_udp() {
    let net = Net::new();
    let args = ["-s", "-B", TO, "-p", "5201"];
    let _server = net.server.start("iperf3", &args);
    net.server.wait_open("tcp", 5201);
    for backend in BACKENDS {
        redirect(&net, backend, &["tcp", "udp"], (5300, 5201));
        let run = |args: &str| -> Value {
            let line = format!("iperf3 -J -c {FROM} -p 5300 {args}");
            let mut result = Value::Null;
            // The server ends a test a little later than its client.
            wait_until("iperf3 takes another client", LEAVE, || {
                let text = net.client.output("sh", &["-c", &line]);
                result = serde_json::from_slice(&text.stdout).unwrap();
                let busy = result["error"].as_str().is_some_and(|e| e.contains("busy"));
                !busy
            });
            result
        };
        for direction in ["", "-R"] {
            let tcp = run(&format!("-n 20M {direction}"));
            // What is under way when the sender has sent all is not counted any more.
            let received = tcp["end"]["sum_received"]["bytes"].as_u64();
            let received = received.unwrap_or_else(|| panic!("{backend} {direction}: {tcp:#}"));
            assert!(received >= 5_000_000, "{backend} {direction}: {received}");
            // A machine may be too busy for a moment; a backend that fails loses all, each time.
            let said = (0..3).try_fold(String::new(), |_, _| {
                let udp = run(&format!("-u -b 20M -t 1 -l 1200 {direction}"));
                let sum = &udp["end"]["sum"];
                let number = |name: &str| sum[name].as_i64();
                let (Some(packets), Some(lost)) = (number("packets"), number("lost_packets"))
                else {
                    panic!("{backend} {direction}: {udp:#}");
                };
                match packets > 1000 && lost < packets / 10 {
                    true => Err(()),
                    false => Ok(format!("{lost} of {packets}")),
                }
            });
            assert_eq!(said, Err(()), "{backend} {direction}: lost");
        }
        net.redirect("del --all");
    }
}

#[test]
fn a_dns_server() {
    let net = Net::new();
    let _server = Guard::start(
        net.server
            .command("dnsmasq")
            .args(DNSMASQ.split(' '))
            .args([
                "--listen-address=10.0.1.2",
                "--bind-interfaces",
                "--address=/steady.test/192.0.2.7",
            ]),
    );
    net.server.wait_open("udp", 5353);
    for backend in BACKENDS {
        redirect(&net, backend, &["udp", "tcp"], (53, 5353));
        for how in ["+notcp", "+tcp"] {
            let line = format!("dig +short +time=20 +tries=1 {how} @{FROM} a.steady.test");
            assert_eq!(net.client.run(&line), "192.0.2.7\n", "{backend} {how}");
        }
        net.redirect("del --all");
    }
}

/// nginx of the system, or the one that scripts/setup has unpacked: installed it would be a service.
fn nginx() -> String {
    let unpacked = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/tools/nginx/usr/sbin/nginx"
    );
    let all = ["/usr/sbin/nginx", unpacked];
    let found = all.into_iter().find(|p| Path::new(p).exists());
    found
        .expect("nginx: scripts/setup --test brings it")
        .to_owned()
}

#[test]
fn nginx_by_curl() {
    let net = Net::new();
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    let body: Vec<u8> = (0..5_000_000u32).map(|i| (i ^ i >> 7) as u8).collect();
    std::fs::write(dir.path().join("file"), &body).unwrap();
    let conf = format!(
        "daemon off; master_process off; pid {at}/pid; error_log {at}/log;\n\
         events {{}}\n\
         http {{ access_log off; client_body_temp_path {at}/b; proxy_temp_path {at}/p;\n\
           fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; scgi_temp_path {at}/s;\n\
           server {{ listen 10.0.1.2:8083; listen [fd01::2]:8083; root {at}; }} }}\n"
    );
    let file = dir.path().join("conf");
    std::fs::write(&file, conf).unwrap();
    let line = format!("-c {} -p {at} -e {at}/log", file.display());
    let args: Vec<&str> = line.split(' ').collect();
    let _server = net.server.start(&nginx(), &args);
    net.server.wait_open("tcp", 8083);
    for backend in BACKENDS {
        redirect(&net, backend, &["tcp"], (80, 8083));
        net.add("tcp", "[fd08::17]:80", "[fd01::2]:8083", backend);
        for host in [FROM, "[fd08::17]"] {
            let url = format!("http://{host}/file");
            let args = ["-gsS", "--max-time", "60", &url];
            let got = net.client.output("curl", &args);
            let (said, bytes) = (stderr(&got), got.stdout);
            let length = bytes.len();
            assert!(bytes == body, "{backend} {host}: {length} bytes, {said}");
        }
        net.redirect("del --all");
    }
}

#[test]
fn a_long_stream_arrives_as_it_was_sent() {
    let net = Net::new();
    for backend in BACKENDS {
        redirect(&net, backend, &["tcp"], (8080, 8083));
        let listener = net.server.listen("10.0.1.2:8083");
        let stream = net.client.connect("10.0.8.17:8080");
        transfer(&stream, listener.accept().unwrap().0, LONG);
        net.redirect("del --all");
    }
}
