//! The kubelet's probes get answers while many clients are connected and while the API server hangs.

use futures_util::future::join_all;
use tokio::net::TcpSocket;

use super::*;

#[tokio::test]
async fn slow_list_of_kubevirt_objects_does_not_fail_health() {
    let agent = Agent::start().await;
    agent.api.hang_kubevirt(true);
    let (code, _, body) = agent.get("/healthz").await;
    assert_eq!(code, 200, "{body}");
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["apiserver"]["connectivity"], "ok");
    assert_eq!(body.get("config-resource-version"), None);
}

#[tokio::test]
async fn concurrent_probes_share_one_check() {
    let api = ApiServer::default();
    let health = ApiHealth::start(api.client());
    let answers = join_all((0..500).map(|_| health.get())).await;
    assert!(answers.iter().all(health::Health::is_ok));
    assert_eq!(api.version_requests(), 1);
}

#[tokio::test]
async fn idle_connections_of_one_address_leave_places_for_others() {
    let agent = Agent::start().await;
    let idle = join_all((0..MAX_CONNECTIONS + 8).map(|_| TcpStream::connect(agent.address))).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let kubelet = socket.connect(agent.address).await.unwrap();
    let probed = agent.get_over(kubelet, "/healthz");
    let (code, _, body) = timeout(Duration::from_secs(5), probed).await.unwrap();
    assert_eq!(code, 200, "{body}");
    drop(idle);
}
