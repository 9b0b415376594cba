//! The service over TLS, with an API server and shims that the test plays.

use std::time::Instant;

use husk_proto::shim::v1::{Disk, DiskMetrics, InfoResponse, Interface, InterfaceMetrics, Metrics, Phase};
use husk_proto::vmm::v1::{DiskCounters, NicCounters};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

mod crowds;

use super::*;
use crate::event::EventSender;
use crate::service::TlsOptions;
use crate::testing::api_server::ApiServer;
use crate::testing::authority::{Authority, Identity};
use crate::vmi::testing::{NODE, scheduled};
use crate::vmi::{PodsDir, RuntimeDir, VmiController};
use husk_agent_testing::shim::Shim;

/// An agent without VMIs.
struct Agent {
    address: std::net::SocketAddr,
    api: ApiServer,
    authority: Authority,
    finder: VmiFinder,
    readiness: Readiness,
    rest: watch::Sender<Option<Arc<TlsSettings>>>,
    plugin: watch::Sender<bool>,
    dir: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

impl Agent {
    async fn start() -> Agent {
        let (dir, api, authority) = (
            tempfile::tempdir().unwrap(),
            ApiServer::default(),
            Authority::new(),
        );
        let client = api.client();
        let events = EventSender::new(client.clone(), NODE.to_owned());
        let folder = dir.path().to_owned();
        let (controller, finder, _foreign) = VmiController::new(
            NODE.to_owned(),
            RuntimeDir::at(folder.clone()),
            PodsDir::at(folder.clone(), folder, "/".into()),
            client.clone(),
            events,
        );
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(controller.run(stopped.clone()));
        let (rest, rest_tls) = watch::channel(None);
        let (plugin, registered) = watch::channel(false);
        let readiness = Readiness {
            vmis: finder.listed(),
            rest: rest_tls,
            plugins: vec![("kvm", registered)],
        };
        let Identity { certificate, key } = authority.server();
        let (certificate, key) = (certificate.as_bytes(), key.as_bytes());
        let settings = TlsSettings::for_anyone(certificate, key, &TlsOptions::default()).unwrap();
        let (_, tls) = watch::channel(Some(Arc::new(settings)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let node = NODE.to_owned();
        let served = serve(
            listener,
            tls,
            node,
            client,
            finder.clone(),
            readiness.clone(),
            stopped,
        );
        tokio::spawn(served);
        Agent {
            address,
            api,
            authority,
            finder,
            readiness,
            rest,
            plugin,
            dir,
            _stop: stop,
        }
    }

    /// A running VMI.
    async fn vmi(&self, name: &str, change: impl FnOnce(&mut Value)) -> Shim {
        let shim = Shim::start(self.dir.path(), &format!("{name}-pod"));
        let mut vmi = scheduled(name);
        change(&mut vmi);
        self.api.put(vmi);
        while self.api.vmi(name)["status"]["phase"] != "Running" {
            sleep(Duration::from_millis(5)).await;
        }
        shim
    }

    /// Status, header and body of an answer.
    async fn get(&self, path: &str) -> (u16, String, String) {
        self.get_over(TcpStream::connect(self.address).await.unwrap(), path)
            .await
    }

    async fn get_over(&self, stream: TcpStream, path: &str) -> (u16, String, String) {
        let mut stream = self.authority.handshake(stream, None).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let code = head.split(' ').nth(1).unwrap().parse().unwrap();
        (code, head.to_lowercase(), body.to_owned())
    }

    async fn metrics(&self) -> String {
        let (code, head, body) = self.get("/metrics").await;
        assert_eq!(code, 200, "{body}");
        assert!(
            head.contains("content-type: application/openmetrics-text"),
            "{head}"
        );
        assert!(body.ends_with("# EOF\n"));
        body
    }
}

#[tokio::test]
async fn healthz_reports_cached_api_server_version() {
    let agent = Agent::start().await;
    for _ in 0..20 {
        let (code, head, body) = agent.get("/healthz").await;
        assert_eq!(code, 200, "{body}");
        assert!(head.contains("content-type: application/json"), "{head}");
        let expected = json!({
            "apiserver": {
                "connectivity": "ok",
                "version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            },
            "config-resource-version": "3",
        });
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), expected);
    }
    assert_eq!(agent.api.version_requests(), 1);
}

#[tokio::test]
async fn health_fails_in_time_if_the_api_server_hangs() {
    let agent = Agent::start().await;
    agent.api.hang();
    let start = Instant::now();
    let answers = futures_util::future::join_all((0..5).map(|_| agent.get("/healthz"))).await;
    assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    for (code, _, body) in answers {
        assert_eq!(code, 500, "{body}");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["apiserver"]["connectivity"], "failed");
        assert!(
            body["apiserver"]["error"]
                .as_str()
                .unwrap()
                .contains("does not answer")
        );
    }
}

#[tokio::test]
async fn agent_is_ready_when_all_parts_are() {
    let agent = Agent::start().await;
    while agent.get("/readyz").await.2.contains("VMIs") {
        sleep(Duration::from_millis(5)).await;
    }
    let (code, _, body) = agent.get("/readyz").await;
    assert_eq!(code, 503);
    assert!(
        body.contains("virt-api") && body.contains("the device kvm"),
        "{body}"
    );
    assert!(
        agent
            .metrics()
            .await
            .contains("kubevirt_virt_handler_ready_status 0\n")
    );
    agent
        .rest
        .send_replace(Some(Arc::new(agent.authority.settings())));
    assert_eq!(agent.get("/readyz").await.0, 503);
    agent.plugin.send_replace(true);
    let (code, _, body) = agent.get("/readyz").await;
    assert_eq!((code, body.as_str()), (200, "ok"));
    assert!(
        agent
            .metrics()
            .await
            .contains("kubevirt_virt_handler_ready_status 1\n")
    );
    assert_eq!(agent.get("/start-profiler").await.0, 404);
}

/// The answer of a shim whose VM has a disk and an interface.
fn info() -> InfoResponse {
    let counters = |frames| NicCounters {
        frames,
        bytes: frames * 100,
        dropped: 1,
        errors: 2,
    };
    InfoResponse {
        vcpus: 2,
        guest_memory_bytes: 1 << 30,
        disks: vec![Disk {
            name: "root".to_owned(),
            ..Disk::default()
        }],
        interfaces: vec![Interface {
            name: "default".to_owned(),
            ..Interface::default()
        }],
        metrics: Some(Metrics {
            vcpu_run_ns: vec![2_500_000_000, 1_000_000_000],
            vcpu_delay_ns: vec![0, 500_000_000],
            resident_bytes: Some(123_456),
            balloon_bytes: Some(1 << 29),
            cpu_user_ns: Some(3_000_000_000),
            cpu_system_ns: Some(1_000_000_000),
            disks: vec![DiskMetrics {
                name: "root".to_owned(),
                counters: Some(DiskCounters {
                    reads: 1,
                    read_bytes: 4096,
                    writes: 2,
                    written_bytes: 8192,
                    flushes: 3,
                }),
            }],
            interfaces: vec![InterfaceMetrics {
                name: "default".to_owned(),
                received: Some(counters(7)),
                sent: Some(counters(9)),
            }],
        }),
        ..InfoResponse::default()
    }
}

/// The samples of [`info`], with `LABELS` for the labels that all have.
const SAMPLES: &str = r#"husk_vmi_shim_answers{LABELS} 1
husk_vmi_guest_reboots_total{LABELS} 0
kubevirt_vmi_memory_domain_bytes{LABELS} 1073741824
kubevirt_vmi_memory_resident_bytes{LABELS} 123456
kubevirt_vmi_memory_actual_balloon_bytes{LABELS} 536870912
kubevirt_vmi_cpu_usage_seconds_total{LABELS} 4.0
kubevirt_vmi_cpu_user_usage_seconds_total{LABELS} 3.0
kubevirt_vmi_cpu_system_usage_seconds_total{LABELS} 1.0
kubevirt_vmi_vcpu_seconds_total{LABELS,id="0",state="running"} 2.5
kubevirt_vmi_vcpu_seconds_total{LABELS,id="1",state="running"} 1.0
kubevirt_vmi_vcpu_delay_seconds_total{LABELS,id="0"} 0.0
kubevirt_vmi_vcpu_delay_seconds_total{LABELS,id="1"} 0.5
kubevirt_vmi_storage_iops_read_total{LABELS,drive="root"} 1
kubevirt_vmi_storage_iops_write_total{LABELS,drive="root"} 2
kubevirt_vmi_storage_read_traffic_bytes_total{LABELS,drive="root"} 4096
kubevirt_vmi_storage_write_traffic_bytes_total{LABELS,drive="root"} 8192
kubevirt_vmi_storage_flush_requests_total{LABELS,drive="root"} 3
kubevirt_vmi_network_traffic_bytes_total{LABELS,interface="default",type="rx"} 700
kubevirt_vmi_network_traffic_bytes_total{LABELS,interface="default",type="tx"} 900
kubevirt_vmi_network_receive_bytes_total{LABELS,interface="default"} 700
kubevirt_vmi_network_receive_packets_total{LABELS,interface="default"} 7
kubevirt_vmi_network_receive_errors_total{LABELS,interface="default"} 2
kubevirt_vmi_network_receive_packets_dropped_total{LABELS,interface="default"} 1
kubevirt_vmi_network_transmit_bytes_total{LABELS,interface="default"} 900
kubevirt_vmi_network_transmit_packets_total{LABELS,interface="default"} 9
kubevirt_vmi_network_transmit_errors_total{LABELS,interface="default"} 2
kubevirt_vmi_network_transmit_packets_dropped_total{LABELS,interface="default"} 1"#;

#[tokio::test]
async fn running_vmi_has_the_metrics_of_virt_handler() {
    let agent = Agent::start().await;
    let shim = agent
        .vmi("vm", |vmi| {
            vmi["metadata"]["labels"] = json!({"app.kubernetes.io/name": "a\"b", "x-y": "1", "x.y": "2"});
        })
        .await;
    shim.describe(info());
    let text = agent.metrics().await;
    let samples: Vec<&str> = text.lines().filter(|line| line.contains("name=\"vm\"")).collect();
    // Of two labels with one name, one is there.
    let labels = "kubernetes_vmi_label_app_kubernetes_io_name=\"a\\\"b\",kubernetes_vmi_label_x_y=\"2\",\
                  name=\"vm\",namespace=\"default\",node=\"node1\"";
    let expected = SAMPLES.replace("LABELS", labels);
    let expected: Vec<&str> = expected.lines().collect();
    assert_eq!(samples, expected);
    assert!(text.contains("\nhusk_agent_vmis 1\n"), "{text}");
}

#[tokio::test]
async fn unknown_and_made_up_values_are_absent() {
    let agent = Agent::start().await;
    let shim = agent.vmi("vm", |_| {}).await;
    let mut strange = info();
    let metrics = strange.metrics.get_or_insert_default();
    metrics.resident_bytes = None;
    metrics.balloon_bytes = None;
    metrics.cpu_system_ns = None;
    metrics.vcpu_run_ns = vec![1; 300];
    metrics.disks.push(metrics.disks[0].clone());
    let other = |name: &str| DiskMetrics {
        name: name.to_owned(),
        ..metrics.disks[0].clone()
    };
    metrics.disks.extend([other("made-up"), other("")]);
    shim.describe(strange);
    let text = agent.metrics().await;
    for absent in [
        "memory_resident",
        "balloon",
        "cpu_usage",
        "cpu_user",
        "made-up",
        "drive=\"\"",
        "id=\"2\"",
    ] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    let reads = text
        .lines()
        .filter(|line| line.starts_with("kubevirt_vmi_storage_iops_read_total"));
    assert_eq!(reads.count(), 1);
}

#[tokio::test]
async fn panics_are_counted_beyond_the_end_of_the_vm() {
    let agent = Agent::start().await;
    let shim = agent.vmi("vm", |_| {}).await;
    assert!(!agent.metrics().await.contains("guest_os_panic"));
    shim.change(|status| status.panics = 1);
    let counted = |count: u64| {
        format!(
            "kubevirt_vmi_guest_os_panic_total{{namespace=\"default\",name=\"vm\",type=\"unknown\",bugcheck_code=\"unknown\"}} {count}\n"
        )
    };
    while !agent.metrics().await.contains(&counted(1)) {
        sleep(Duration::from_millis(5)).await;
    }
    // That is a panic more.
    shim.end(Phase::Failed, "GuestPanic");
    while agent.api.vmi("vm")["status"]["phase"] != "Failed" {
        sleep(Duration::from_millis(5)).await;
    }
    assert!(agent.metrics().await.contains(&counted(2)));
}

#[tokio::test]
async fn a_hanging_shim_lacks_only_its_own_metrics() {
    let agent = Agent::start().await;
    let (good, bad) = (agent.vmi("good", |_| {}).await, agent.vmi("bad", |_| {}).await);
    good.describe(info());
    bad.hang();
    let start = Instant::now();
    // Scrapes at the same time share their work.
    let texts = futures_util::future::join_all((0..8).map(|_| agent.metrics())).await;
    assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    for text in texts {
        let of = |name: &str, vmi: &str| {
            let mut lines = text.lines();
            let line = lines.find(|line| line.starts_with(name) && line.contains(&format!("name=\"{vmi}\"")));
            line.map(|line| line.rsplit_once(' ').unwrap().1.to_owned())
        };
        assert_eq!(of("husk_vmi_shim_answers", "bad").as_deref(), Some("0"));
        assert_eq!(of("husk_vmi_shim_answers", "good").as_deref(), Some("1"));
        assert_eq!(of("kubevirt_vmi_memory_resident_bytes", "bad"), None);
        assert!(of("kubevirt_vmi_memory_resident_bytes", "good").is_some());
    }
}

#[tokio::test]
async fn scrapes_beyond_the_queue_are_refused() {
    let agent = Agent::start().await;
    let shim = agent.vmi("vm", |_| {}).await;
    shim.hang();
    let scraper = Scraper::start(NODE.to_owned(), agent.finder.clone(), agent.readiness.clone());
    let answers = futures_util::future::join_all((0..60).map(|_| scraper.scrape())).await;
    let answered = answers.iter().filter(|answer| answer.is_some()).count();
    assert_eq!(answered, 16);
    assert!(scraper.scrape().await.is_some());
}

#[tokio::test]
async fn silent_and_slow_clients_are_disconnected() {
    let agent = Agent::start().await;
    let mut silent = agent.authority.connect(agent.address, None).await.unwrap();
    let mut slow = agent.authority.connect(agent.address, None).await.unwrap();
    slow.write_all(b"GET /metrics HTTP/1.1\r\nHost: ").await.unwrap();
    let mut plain = TcpStream::connect(agent.address).await.unwrap();
    plain.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let closed = Duration::from_secs(8);
    let _ = timeout(closed, silent.read_to_end(&mut answer)).await.unwrap();
    let _ = timeout(closed, slow.read_to_end(&mut answer)).await.unwrap();
    assert!(!String::from_utf8_lossy(&answer).contains("200 OK"));
    answer.clear();
    let _ = timeout(closed, plain.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    assert_eq!(agent.get("/healthz").await.0, 200);
}
