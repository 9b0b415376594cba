//! TLS versions and ciphers that an administrator allows: `spec.configuration.tlsConfiguration` of the KubeVirt object.

use kube::core::DynamicObject;
use rustls::crypto::CryptoProvider;
use rustls::version::{TLS12, TLS13};
use rustls::{SupportedCipherSuite, SupportedProtocolVersion};

/// The options of new connections. By default TLS 1.2 and 1.3 with all ciphers; older versions are never served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsOptions {
    only_tls13: bool,
    /// Ciphers of TLS 1.2 by their IANA names; all if it is empty. As in virt-handler, the list does not limit those of
    /// TLS 1.3.
    ciphers: Vec<String>,
}

impl TlsOptions {
    /// Reads the options of the KubeVirt object, whose values the API server has checked.
    #[must_use]
    pub fn of(kubevirt: &DynamicObject) -> TlsOptions {
        let given = &kubevirt.data["spec"]["configuration"]["tlsConfiguration"];
        let ciphers = given["ciphers"].as_array().into_iter().flatten();
        TlsOptions {
            only_tls13: given["minTLSVersion"] == "VersionTLS13",
            ciphers: ciphers
                .filter_map(|cipher| Some(cipher.as_str()?.to_owned()))
                .collect(),
        }
    }

    /// True if TLS 1.2 is allowed, but the agent has none of the listed ciphers.
    pub(super) fn lacks_ciphers(&self) -> bool {
        !self.only_tls13 && self.versions() == [&TLS13]
    }

    /// The versions to serve. Without a cipher for TLS 1.2 it is only TLS 1.3.
    pub(super) fn versions(&self) -> &'static [&'static SupportedProtocolVersion] {
        static BOTH: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];
        let suites = self.provider().cipher_suites;
        match suites.iter().any(|suite| suite.version() == &TLS12) {
            true => &BOTH,
            false => &BOTH[..1],
        }
    }

    /// The ciphers to serve.
    pub(super) fn provider(&self) -> CryptoProvider {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites.retain(|suite| self.allows(*suite));
        provider
    }

    fn allows(&self, suite: SupportedCipherSuite) -> bool {
        let is_listed = || {
            let name = suite.suite().as_str();
            self.ciphers.iter().any(|cipher| Some(cipher.as_str()) == name)
        };
        suite.version() == &TLS13 || (!self.only_tls13 && (self.ciphers.is_empty() || is_listed()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(configuration: Value) -> TlsOptions {
        let object = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "metadata": {"name": "kubevirt"},
            "spec": {"configuration": {"tlsConfiguration": configuration}},
        });
        TlsOptions::of(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn versions_and_ciphers_are_those_of_the_object() {
        let both: &[_] = &[&TLS13, &TLS12];
        for configuration in [
            json!(null),
            json!({}),
            json!({"minTLSVersion": "VersionTLS10", "ciphers": []}),
        ] {
            let options = of(configuration);
            assert_eq!(options, TlsOptions::default());
            assert_eq!(options.versions(), both);
        }
        assert_eq!(of(json!({"minTLSVersion": "VersionTLS13"})).versions(), [&TLS13]);
        let aes = "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384";
        let options = of(json!({"ciphers": [aes, "TLS_RSA_WITH_AES_128_CBC_SHA"]}));
        assert_eq!(options.versions(), both);
        let suites = options.provider().cipher_suites;
        let of_tls12 = suites.iter().filter(|suite| suite.version() == &TLS12);
        let names: Vec<_> = of_tls12.map(|suite| suite.suite().as_str().unwrap()).collect();
        assert_eq!((names, suites.len()), (vec![aes], 4));
        let unknown = of(json!({"ciphers": ["TLS_RSA_WITH_AES_128_CBC_SHA"]}));
        assert!(unknown.versions() == [&TLS13] && unknown.lacks_ciphers());
        assert!(!options.lacks_ciphers() && !of(json!({"minTLSVersion": "VersionTLS13"})).lacks_ciphers());
    }
}
