//! States with changed values cost an error, or at most the guest: never the process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use husk_proto::vmm::v1::{self as pb};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_stream::StreamExt;

use super::rig::Rig;
use super::saved_vm::{Saved, letters, paused};

const CHANGES: u32 = 120;
/// Maximum time of one VMM, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(120);

/// A small generator of numbers (xorshift), so that a seed repeats the test.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit.max(1)
    }
}

/// Number of values below `value`, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum::<usize>(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The value number `at` in the order of [`count`].
fn nth(value: &mut Value, at: usize) -> &mut Value {
    if at == 0 {
        return value;
    }
    let mut left = at - 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => fields.values_mut().collect(),
        _ => vec![],
    };
    for child in children {
        let size = count(child);
        if left < size {
            return nth(child, left);
        }
        left -= size;
    }
    unreachable!("there are fewer values")
}

fn change(value: &mut Value, numbers: &mut Numbers) {
    let pick = numbers.below(6);
    *value = match value {
        Value::Number(number) => {
            let old = number.as_u64().unwrap_or(0);
            match pick {
                0 => json!(0),
                1 => json!(u64::MAX),
                2 => json!(old ^ 1 << numbers.below(64)),
                3 => json!(-1),
                4 => json!(old.wrapping_add(1)),
                _ => json!(u32::MAX),
            }
        }
        Value::Bool(old) => json!(!*old),
        Value::Null => json!(numbers.below(9)),
        Value::String(old) if pick < 4 && !old.is_empty() => {
            // One byte of a structure of KVM's, or of a name.
            let mut text = old.clone().into_bytes();
            let at = numbers.below(text.len());
            text[at] = b"A/b9"[numbers.below(4)];
            json!(String::from_utf8_lossy(&text))
        }
        Value::String(_) => json!(""),
        Value::Array(items) if pick < 3 && !items.is_empty() => {
            let mut items = items.clone();
            items.remove(numbers.below(items.len()));
            Value::Array(items)
        }
        Value::Array(items) => Value::Array([items.clone(), items.clone()].concat()),
        Value::Object(fields) => {
            let mut fields = fields.clone();
            if let Some(name) = fields.keys().nth(numbers.below(fields.len())).cloned() {
                fields.remove(&name);
            }
            Value::Object(fields)
        }
    };
}

/// Lets a guest go on from the state for a moment. Returns true if the state was refused.
async fn is_refused(saved: &Saved) -> bool {
    let mut rig = Rig::start().await;
    let events = rig.client.events(pb::EventsRequest {}).await;
    let mut events = events.unwrap().into_inner();
    let config = rig.config(&letters()).await;
    let files = saved.send(&rig).await;
    let refused = rig.create_from(config, Some(files)).await.is_err();
    if !refused {
        // The guest may end at once.
        let _ = rig.boot().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let _ = rig.client.stop(pb::StopRequest {}).await;
    while let Some(Ok(_)) = events.next().await {}
    let log = rig.log();
    assert!(!log.contains("panic"), "{log}");
    let status = rig.wait().await;
    assert!(status.code().is_some(), "{status}: {log}");
    refused
}

#[tokio::test]
async fn a_state_with_a_changed_value_costs_an_error_or_the_guest() {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    let seed = std::env::var("HUSK_STATE_SEED").map_or(seed, |text| text.parse().unwrap());
    let mut numbers = Numbers(seed);
    let (mut rig, _) = paused().await;
    let saved = Saved::empty();
    saved.save(&mut rig).await.unwrap();
    let good: Value = serde_json::from_str(&saved.state_text()).unwrap();
    let mut refused = 0;
    for _ in 0..CHANGES {
        let mut document = good.clone();
        let at = numbers.below(count(&good));
        change(nth(&mut document, at), &mut numbers);
        println!("HUSK_STATE_SEED={seed}: value {at}");
        let changed = saved.with_state(&document.to_string());
        let ended = timeout(LIMIT, is_refused(&changed)).await;
        refused += u32::from(ended.expect("the VMM ends"));
    }
    assert!(refused > CHANGES / 10, "only {refused} of {CHANGES} are refused");
    assert!(!is_refused(&saved).await);
}
