//! The control socket: one line of JSON in, one line out.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::runtime::{Request, Response, RunDir};

/// Longest request that is read, and how long one may take to arrive.
const MAX_REQUEST_BYTES: u64 = 4096;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

type Asked = (Request, oneshot::Sender<Response>);

/// Accepts clients and hands their requests over one by one.
pub struct Server {
    requests: mpsc::Receiver<Asked>,
    accept: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Listens in the folder whose lock the caller holds; only root may connect.
    pub fn bind(run_dir: &RunDir) -> Result<Self> {
        let path = run_dir.socket();
        // Left over from a daemon that was killed: we hold the lock, so nobody listens on it.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        let (sender, requests) = mpsc::channel(16);
        let accept = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, sender.clone()));
            }
        });
        Ok(Self { requests, accept })
    }

    /// The next request and where its answer goes. Cancel safe.
    pub async fn next(&mut self) -> Asked {
        match self.requests.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }

    /// Stops accepting and lets the answers under way leave.
    pub async fn finish(self) {
        self.accept.abort();
        tokio::time::sleep(Duration::from_millis(50)).await;
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
