//! The cluster's certificates, keys and kubeconfigs, made by `openssl`.

use super::network::{API_SERVICE, HOST, NodeNetwork};
use super::node;
use crate::finish::finish;
use crate::progress::Progress;
use anyhow::Result;
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// Days that a certificate is valid.
const DAYS: &str = "30";

/// Makes all certificates of a cluster of `nodes` nodes in `folder`: the CAs `ca` and `front-proxy-ca`, and what they sign.
pub fn make(progress: &Progress, folder: &Path, nodes: u32) -> Result<()> {
    let step = progress.step("making the cluster's certificates");
    let openssl = |words: &[&str]| finish(Command::new("openssl").args(words).current_dir(folder)).map(drop);
    let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"];
    let request = |name: &str, subject: &str, more: &[&str]| -> Result<()> {
        let (key, certificate) = (format!("{name}.key"), format!("{name}.crt"));
        let files = [
            "-keyout",
            &key,
            "-out",
            &certificate,
            "-days",
            DAYS,
            "-subj",
            subject,
        ];
        openssl(&[&["req", "-x509"], &new_key[..], &files, more].concat())
    };
    for ca in ["ca", "front-proxy-ca"] {
        let extensions = [
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        ];
        request(ca, &format!("/CN=husk-cluster-{ca}"), &extensions)?;
    }
    let signed = |name: &str, subject: &str, ca: &str, alternatives: &str| -> Result<()> {
        let (certificate, key) = (format!("{ca}.crt"), format!("{ca}.key"));
        let alternatives = format!("subjectAltName={alternatives}");
        let extensions = [
            "-CA",
            &certificate,
            "-CAkey",
            &key,
            "-addext",
            "basicConstraints=CA:FALSE",
            "-addext",
            "extendedKeyUsage=serverAuth,clientAuth",
            "-addext",
            &alternatives,
        ];
        request(name, subject, &extensions)
    };
    let names = format!(
        "IP:127.0.0.1,IP:{HOST},IP:{API_SERVICE},DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,\
         DNS:kubernetes.default.svc"
    );
    signed("api-server", "/CN=kube-apiserver", "ca", &names)?;
    signed("admin", "/O=system:masters/CN=admin", "ca", "DNS:admin")?;
    signed("kube-proxy", "/CN=system:kube-proxy", "ca", "DNS:kube-proxy")?;
    signed(
        "front-proxy-client",
        "/CN=front-proxy-client",
        "front-proxy-ca",
        "DNS:front-proxy-client",
    )?;
    kubeconfig(folder, "admin")?;
    kubeconfig(folder, "kube-proxy")?;
    for number in 1..=nodes {
        let (name, network) = (node::name(number), NodeNetwork::of(number));
        let names = format!("IP:{},DNS:{name}", network.address);
        let subject = format!("/O=system:nodes/CN=system:node:{name}");
        signed(&name, &subject, "ca", &names)?;
        kubeconfig(folder, &name)?;
    }
    openssl(&[
        "genpkey",
        "-algorithm",
        "RSA",
        "-pkeyopt",
        "rsa_keygen_bits:2048",
        "-out",
        "accounts.key",
    ])?;
    openssl(&["pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"])?;
    step.done();
    Ok(())
}

/// Writes `NAME.kubeconfig`, which authenticates by `NAME.crt`.
fn kubeconfig(folder: &Path, name: &str) -> Result<()> {
    let file = |suffix: &str| folder.join(format!("{name}.{suffix}"));
    let user = json!({"client-certificate": file("crt"), "client-key": file("key")});
    write_kubeconfig(folder, name, user)
}

/// Writes `NAME.kubeconfig`, which authenticates as `user`.
pub fn write_kubeconfig(folder: &Path, name: &str, user: serde_json::Value) -> Result<()> {
    let server = format!("https://{HOST}:6443");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "husk", "cluster": {
            "server": server,
            "certificate-authority": folder.join("ca.crt"),
        }}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "husk", "context": {"cluster": "husk", "user": name}}],
        "current-context": "husk",
    });
    std::fs::write(folder.join(format!("{name}.kubeconfig")), config.to_string())?;
    Ok(())
}
