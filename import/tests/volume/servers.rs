//! Servers that refuse, redirect, or have certificates of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use husk_images::{Event, HttpSource, Login, VolumeSource};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::downloads::TAG;
use crate::server::{Asked, reply, send, serve, serve_tls};
use crate::{MIB, content, entries, failed, filled, http, import, request, start_with};

#[test]
fn refusals_are_one_line_with_the_remedy() {
    for (status, text) in [
        (
            "401 Unauthorized",
            "URL does not let you read it (HTTP status 401): name a Secret",
        ),
        ("403 Forbidden", "URL does not let you read it (HTTP status 403)"),
        (
            "404 Not Found",
            "URL does not exist (HTTP status 404): correct the URL",
        ),
        ("410 Gone", "URL does not exist (HTTP status 410)"),
        ("418 Teapot", "URL answered with HTTP status 418"),
        ("206 Partial Content", "URL answered with HTTP status 206"),
        ("304 Not Modified", "URL answered with HTTP status 304"),
        ("302 Found", "cannot follow the redirect of URL: it has no target"),
    ] {
        let name = serve(move |_, stream| reply(stream, status, "retry-after: 0\r\n", b"<html>no\n</html>"));
        let directory = tempfile::tempdir().unwrap();
        let source = VolumeSource::Http(http(&format!("http://{name}/a?token=SECRET")));
        let reason = failed(directory.path(), source, None).replace(&format!("http://{name}/a"), "URL");
        assert!(reason.starts_with(text) && !reason.contains("SECRET"), "{reason}");
        assert_eq!(entries(directory.path()), [""; 0]);
    }
}

#[test]
fn a_busy_server_is_asked_again_when_it_says() {
    let file = content(MIB);
    let (sent, count) = (file.clone(), AtomicUsize::new(0));
    let name = serve(move |asked, stream| match count.fetch_add(1, Ordering::Relaxed) {
        0 => reply(stream, "429 Too Many Requests", "retry-after: 1\r\n", b""),
        1 => reply(stream, "503 Service Unavailable", "retry-after: 0\r\n", b""),
        _ => send(asked, stream, &sent, TAG, usize::MAX),
    });
    let directory = tempfile::tempdir().unwrap();
    let source = VolumeSource::Http(http(&format!("http://{name}/a")));
    let begun = Instant::now();
    let events = import(request(directory.path(), source, None));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    let retrying = events
        .iter()
        .filter(|event| matches!(event, Event::Retrying { .. }));
    assert_eq!(retrying.count(), 2, "{events:?}");
    assert_eq!(events.last(), Some(&Event::Filled { size: MIB }));
    let is_download = |event: &&Event| {
        **event
            == Event::Download {
                done: MIB,
                size: Some(MIB),
            }
    };
    assert!(events.iter().any(|event| is_download(&event)), "{events:?}");
    let is_converted = |event: &&Event| **event == Event::Converting { done: MIB, size: MIB };
    assert!(events.iter().any(|event| is_converted(&event)), "{events:?}");
}

#[test]
fn a_server_that_stays_busy_is_given_up() {
    for (headers, text) in [
        (
            "retry-after: 0\r\n",
            "URL is not available now (HTTP status 503): try again later",
        ),
        (
            "retry-after: 3600\r\n",
            "URL asks to retry after 3600 s (HTTP status 503): try again then",
        ),
    ] {
        let name = serve(move |_, stream| reply(stream, "503 Service Unavailable", headers, b""));
        let directory = tempfile::tempdir().unwrap();
        let source = VolumeSource::Http(http(&format!("http://{name}/a")));
        let reason = failed(directory.path(), source, None);
        assert_eq!(reason.replace(&format!("http://{name}/a"), "URL"), text);
    }
}

#[test]
fn secrets_stay_with_the_server_of_the_url() {
    let asked_for =
        |asked: &Asked| ["authorization", "x-token"].map(|name| asked.header(name).map(str::to_owned));
    let file = content(MIB);
    let (sent, seen) = (file.clone(), Arc::new(Mutex::new(Vec::new())));
    let (first, second) = (seen.clone(), seen.clone());
    let other = serve(move |asked, stream| {
        first.lock().unwrap().push(asked_for(asked));
        send(asked, stream, &sent, TAG, usize::MAX);
    });
    let name = serve(move |asked, stream| {
        second.lock().unwrap().push(asked_for(asked));
        let location = match asked.path.as_str() {
            "/a" => "location: b\r\n".to_owned(),
            _ => format!("location: http://{other}/c\r\n"),
        };
        reply(stream, "302 Found", &location, b"");
    });
    let source = HttpSource {
        login: Some(Login {
            user: "user".into(),
            password: "pass".into(),
        }),
        headers: vec![("X-Token".into(), "secret".into())],
        ..http(&format!("http://{name}/a"))
    };
    let directory = tempfile::tempdir().unwrap();
    assert!(filled(directory.path(), VolumeSource::Http(source), None) == file);
    let secrets = [Some("Basic dXNlcjpwYXNz".to_owned()), Some("secret".to_owned())];
    assert_eq!(*seen.lock().unwrap(), [secrets.clone(), secrets, [None, None]]);
}

#[test]
fn proxies_are_those_of_the_environment() {
    let file = content(MIB);
    let proxy = serve(move |asked, stream| {
        assert_eq!(asked.path, "http://disks.example/a");
        send(asked, stream, &file, TAG, usize::MAX);
    });
    let directory = tempfile::tempdir().unwrap();
    let source = VolumeSource::Http(http("http://disks.example/a"));
    let child = start_with(
        request(directory.path(), source, None),
        ("http_proxy", &format!("http://{proxy}")),
    );
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(entries(directory.path()), ["disk.img"]);
}

#[test]
fn redirects_end() {
    let name = serve(|_, stream| reply(stream, "302 Found", "location: /a\r\n", b""));
    let directory = tempfile::tempdir().unwrap();
    let source = VolumeSource::Http(http(&format!("http://{name}/a")));
    let reason = failed(directory.path(), source, None);
    assert!(reason.contains("more than 10 redirects"), "{reason}");
    let name = serve(|_, stream| reply(stream, "302 Found", "location: file:///etc/passwd\r\n", b""));
    let source = VolumeSource::Http(http(&format!("http://{name}/a")));
    let reason = failed(directory.path(), source, None);
    assert!(reason.contains("neither http nor https"), "{reason}");
}

/// A server's configuration, and the certificate of its authority.
fn authority() -> (ServerConfig, String) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut params = CertificateParams::new([]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let ca = params.self_signed(&key).unwrap();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    (config, ca.pem())
}

#[test]
fn certificates_of_further_authorities_are_trusted() {
    let ((config, ca), (_, other)) = (authority(), authority());
    let file = content(MIB);
    let sent = file.clone();
    let name = serve_tls(config, move |asked, stream| match asked.path.as_str() {
        "/a" => send(asked, stream, &sent, TAG, usize::MAX),
        _ => reply(stream, "302 Found", "location: http://localhost:1/a\r\n", b""),
    });
    let with = |path: &str, certificates: Vec<String>| {
        VolumeSource::Http(HttpSource {
            certificates,
            ..http(&format!("https://{name}{path}"))
        })
    };
    let directory = tempfile::tempdir().unwrap();
    for certificates in [Vec::new(), vec![other.clone()]] {
        let reason = failed(directory.path(), with("/a", certificates), None);
        let text = format!("the certificate of {name} is not trusted: put its CA's certificate");
        assert!(reason.starts_with(&text), "{reason}");
    }
    // Several in one text.
    let both = vec![format!("{other}{ca}")];
    let reason = failed(directory.path(), with("/b", both.clone()), None);
    assert!(
        reason.starts_with("cannot follow the redirect of ") && reason.contains("from https to http"),
        "{reason}"
    );
    assert!(filled(directory.path(), with("/a", both), None) == file);
}
