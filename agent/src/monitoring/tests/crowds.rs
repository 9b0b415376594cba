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

/// A connection from an address of the loopback.
async fn connect_from(address: [u8; 4], to: std::net::SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((address, 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn idle_connections_leave_places_for_others() {
    for addresses in [1, 20] {
        let agent = Agent::start().await;
        let crowd = (0..MAX_CONNECTIONS + 8)
            .map(|number| connect_from([127, 0, 1, (number % addresses) as u8], agent.address));
        let idle = join_all(crowd).await;
        let kubelet = connect_from([127, 0, 0, 2], agent.address).await;
        let probed = agent.get_over(kubelet, "/healthz");
        let (code, _, body) = timeout(Duration::from_secs(5), probed).await.unwrap();
        assert_eq!(code, 200, "{body}");
        drop(idle);
    }
}

#[tokio::test]
async fn clients_that_have_had_their_answer_leave_places_for_others() {
    let agent = Agent::start().await;
    let crowd = (0..MAX_CONNECTIONS).map(async |number| {
        let stream = connect_from([127, 0, 1, (number % 20) as u8], agent.address).await;
        let mut stream = agent.authority.handshake(stream, None).await.unwrap();
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: agent\r\n\r\n")
            .await
            .unwrap();
        stream
    });
    let mut crowd = join_all(crowd).await;
    let kubelet = connect_from([127, 0, 0, 2], agent.address).await;
    // The time for a header has not run out yet.
    let probed = agent.get_over(kubelet, "/healthz");
    let (code, _, body) = timeout(Duration::from_secs(2), probed).await.unwrap();
    assert_eq!(code, 200, "{body}");
    let mut answer = [0; 12];
    crowd.last_mut().unwrap().read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, *b"HTTP/1.1 503");
}
