//! A web server whose replies a test chooses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A request.
#[derive(Debug)]
pub struct Asked {
    pub path: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(header, _)| header == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Offset of the rest that is asked for.
    pub fn offset(&self) -> Option<usize> {
        let range = self.header("range")?.strip_prefix("bytes=")?;
        range.strip_suffix('-')?.parse().ok()
    }
}

/// Answers a request; may write anything.
pub type Answer = dyn Fn(&Asked, &mut dyn Write) + Send + Sync;

/// Serves on a port of localhost, and returns `localhost:PORT`.
pub fn serve(answer: impl Fn(&Asked, &mut dyn Write) + Send + Sync + 'static) -> String {
    start(None, Arc::new(answer))
}

/// As [`serve`], with TLS.
pub fn serve_tls(
    config: ServerConfig,
    answer: impl Fn(&Asked, &mut dyn Write) + Send + Sync + 'static,
) -> String {
    start(Some(Arc::new(config)), Arc::new(answer))
}

fn start(config: Option<Arc<ServerConfig>>, answer: Arc<Answer>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("localhost:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (config, answer) = (config.clone(), answer.clone());
            std::thread::spawn(move || connection(stream, config, &*answer));
        }
    });
    name
}

fn connection(stream: TcpStream, config: Option<Arc<ServerConfig>>, answer: &Answer) {
    match config {
        Some(config) => {
            let mut tls = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
            let Some(asked) = read(&mut tls) else { return };
            answer(&asked, &mut tls);
            tls.conn.send_close_notify();
            let _ = tls.flush();
        }
        None => {
            let mut stream = stream;
            let Some(asked) = read(&mut stream) else { return };
            answer(&asked, &mut stream);
        }
    }
}

fn read(stream: impl Read) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers = lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_lowercase(), value.to_owned()))
        })
        .collect();
    Some(Asked { path, headers })
}

pub fn reply(stream: &mut dyn Write, status: &str, headers: &str, body: &[u8]) {
    let length = body.len();
    begin(stream, status, length, headers);
    let _ = stream.write_all(body);
}

/// The head of a reply with a body of `length` bytes.
pub fn begin(stream: &mut dyn Write, status: &str, length: usize, headers: &str) {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n");
    let _ = stream.write_all(head.as_bytes());
}

/// Sends a file as servers with ranges do, at most `most` bytes of it. Its validators are `headers`, and `if_range` is
/// that of the two that `If-Range` has to have.
pub fn send(
    asked: &Asked,
    stream: &mut dyn Write,
    file: &[u8],
    (headers, if_range): (&str, &str),
    most: usize,
) {
    let offset = asked.offset().filter(|_| {
        let condition = asked.header("if-range");
        condition.is_none_or(|condition| condition == if_range)
    });
    let (status, rest, range) = match offset {
        Some(offset) if offset >= file.len() => {
            let range = format!("content-range: bytes */{}\r\n", file.len());
            return reply(stream, "416 Range Not Satisfiable", &range, b"");
        }
        Some(offset) => {
            let range = format!(
                "content-range: bytes {offset}-{}/{}\r\n",
                file.len() - 1,
                file.len()
            );
            ("206 Partial Content", &file[offset..], range)
        }
        None => ("200 OK", file, String::new()),
    };
    begin(stream, status, rest.len(), &format!("{headers}{range}"));
    let _ = stream.write_all(&rest[..most.min(rest.len())]);
}

/// Serves one file with ranges, and returns its URL.
pub fn serve_file(file: Vec<u8>) -> String {
    let name = serve(move |asked, stream| {
        send(asked, stream, &file, ("etag: \"1\"\r\n", "\"1\""), usize::MAX);
    });
    format!("http://{name}/images/a.img")
}
