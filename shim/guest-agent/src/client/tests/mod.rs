mod commands;
mod freeze;
mod hostile;
mod protocol;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream};
use tokio::task::JoinHandle;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Reaction of the scripted agent to a request.
enum Reaction {
    /// Sends these bytes.
    Send(Vec<u8>),
    /// Answers as a real agent.
    Honest,
    Close,
}

/// Sends the text as the result.
fn result(json: &str) -> Reaction {
    Reaction::Send(format!("{{\"return\": {json}}}\n").into_bytes())
}

fn silence() -> Reaction {
    Reaction::Send(Vec::new())
}

/// Reply of a real agent to a synchronisation: an error for the sentinel of the request comes first.
fn synced(request: &Value) -> Vec<u8> {
    let mut reply =
        br#"{"error": {"class": "GenericError", "desc": "JSON parse error, stray '\uFFFD'"}}"#.to_vec();
    reply.extend(b"\n\xff{\"return\": ");
    reply.extend(request["arguments"]["id"].to_string().bytes());
    reply.extend(b"}\n");
    reply
}

fn honest(request: &Value) -> Vec<u8> {
    match request["execute"].as_str() {
        Some("guest-sync-delimited") => synced(request),
        Some("guest-get-time") => b"{\"return\": 1795575069204508000}\n".to_vec(),
        Some("guest-ping") => b"{\"return\": {}}\n".to_vec(),
        other => panic!("no honest answer to {other:?}"),
    }
}

/// A client and an agent that does what `react` says. The agent returns the requests that it saw.
fn scripted(
    mut react: impl FnMut(&Value) -> Reaction + Send + 'static,
) -> (GuestAgent<DuplexStream>, JoinHandle<Vec<Value>>) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let agent = tokio::spawn(async move {
        let (reader, mut writer) = tokio::io::split(theirs);
        let mut reader = BufReader::new(reader);
        let mut requests = Vec::new();
        loop {
            let mut line = Vec::new();
            if reader.read_until(b'\n', &mut line).await.unwrap() == 0 {
                return requests;
            }
            // A real agent drops what came before the sentinel.
            let start = line
                .iter()
                .rposition(|byte| *byte == SENTINEL)
                .map_or(0, |at| at + 1);
            let request: Value = serde_json::from_slice(&line[start..]).unwrap();
            let bytes = match react(&request) {
                Reaction::Send(bytes) => bytes,
                Reaction::Honest => honest(&request),
                Reaction::Close => return requests,
            };
            requests.push(request);
            if writer.write_all(&bytes).await.is_err() {
                return requests;
            }
        }
    });
    (GuestAgent::new(ours), agent)
}

/// As [`scripted`], with one reaction for all commands but the synchronisation.
fn answering(
    mut react: impl FnMut(&str, &Value) -> Reaction + Send + 'static,
) -> (GuestAgent<DuplexStream>, JoinHandle<Vec<Value>>) {
    scripted(move |request| match request["execute"].as_str() {
        Some("guest-sync-delimited") => Reaction::Honest,
        Some(name) => react(name, &request["arguments"]),
        None => panic!("{request}"),
    })
}

/// Names of the commands that the agent saw.
async fn names(client: GuestAgent<DuplexStream>, agent: JoinHandle<Vec<Value>>) -> Vec<String> {
    drop(client);
    let requests = agent.await.unwrap();
    let name = |request: Value| request["execute"].as_str().unwrap().replace("guest-", "");
    requests.into_iter().map(name).collect()
}
