// SPDX-License-Identifier: GPL-2.0-or-later
//! The control socket: one line of JSON in, one line out.
//!
//! Clients are bounded. When a new one finds [`MAX_CLIENTS`] others, the oldest makes way: commands
//! that are answered at once are never the oldest. Running out of file descriptors only delays
//! the next client.

use std::collections::VecDeque;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::control::run_dir::{Request, Response, RunDir};

/// Longest request that is read, and how long one may take to arrive.
const MAX_REQUEST_BYTES: u64 = 4096;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections that are served at the same time.
const MAX_CLIENTS: usize = 64;
/// Pause after a connection could not be accepted (EMFILE, ENFILE, ENOMEM).
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

type Asked = (Request, oneshot::Sender<Response>);

/// Accepts clients and hands their requests over one by one.
pub(crate) struct Server {
    requests: mpsc::Receiver<Asked>,
    accept: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Listens in the folder whose lock the caller holds; only root may connect.
    pub(crate) fn bind(run_dir: &RunDir) -> Result<Self> {
        let path = run_dir.socket();
        // Left over from a daemon that was killed: we hold the lock, so nobody listens on it.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        let (sender, requests) = mpsc::channel(16);
        let accept = tokio::spawn(accept(listener, sender));
        Ok(Self { requests, accept })
    }

    /// The next request and where its answer goes. Cancel safe.
    pub(crate) async fn next(&mut self) -> Asked {
        match self.requests.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }

    /// Stops accepting and lets the answers under way leave.
    pub(crate) async fn finish(self) {
        self.accept.abort();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn accept(listener: UnixListener, sender: mpsc::Sender<Asked>) {
    let mut clients: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::debug!("cannot accept a client: {e}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        clients.retain(|client| !client.is_finished());
        if clients.len() == MAX_CLIENTS {
            if let Some(oldest) = clients.pop_front() {
                oldest.abort();
            }
        }
        clients.push_back(tokio::spawn(serve(stream, sender.clone())).abort_handle());
    }
}

async fn serve(stream: UnixStream, sender: mpsc::Sender<Asked>) {
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = BufReader::new(read.take(MAX_REQUEST_BYTES));
    match tokio::time::timeout(REQUEST_TIMEOUT, read.read_line(&mut line)).await {
        Ok(Ok(n)) if n > 0 => {}
        _ => return,
    }
    let response = match serde_json::from_str(&line) {
        Ok(request) => {
            let (reply, answer) = oneshot::channel();
            if sender.send((request, reply)).await.is_err() {
                return;
            }
            match answer.await {
                Ok(response) => response,
                Err(_) => return,
            }
        }
        Err(e) => Response::Error(format!("request not understood: {e}")),
    };
    if let Ok(mut text) = serde_json::to_string(&response) {
        text.push('\n');
        let _ = write.write_all(text.as_bytes()).await;
    }
}
