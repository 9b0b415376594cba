//! `husk inspect`.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use husk_monitor::client;
use husk_monitor::state::VmDir;
use husk_proto::shim::v1::GuestInfoRequest;
use serde::Serialize;
use serde_json::Value;

use super::guest;
use crate::failure::{Failure, chain};
use crate::vm_ref::VmRef;
use crate::vm_view::VmView;
use crate::{live_vm, output};

/// Maximum size of a state file in bytes.
const MAX_STATE_FILE: u64 = 16 << 20;

/// Show the details of a running VM
///
/// Shows its state, processes and files, and the plan it was built from: the manifest with all defaults applied and all
/// volumes resolved.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  husk inspect demo
  husk inspect demo -o json | jq .plan.disks")]
pub(crate) struct Args {
    /// The VM: NAME or NAMESPACE/NAME
    vm: VmRef,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: InspectFormat,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum InspectFormat {
    /// YAML
    #[default]
    Yaml,
    /// JSON
    Json,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inspected {
    #[serde(flatten)]
    view: VmView,
    /// The last answers of the guest agent, as `husk guest info` shows them.
    #[serde(skip_serializing_if = "Option::is_none")]
    guest_agent: Option<Value>,
    /// Metadata of the manifest.
    metadata: Value,
    /// `husk_vmi::VmPlan`.
    plan: Value,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let dir = live_vm::find(&args.vm)?;
    let inspected = live_vm::block_on(async {
        let info = live_vm::info(&mut client::connect(&dir).await?).await?;
        Ok(Inspected {
            view: VmView::new(&dir, Some(info)),
            guest_agent: guest_agent(&dir).await,
            metadata: read(&dir.vmi())?,
            plan: read(&dir.plan())?,
        })
    })?;
    output::print(&match args.output {
        InspectFormat::Json => output::json(&inspected)?,
        InspectFormat::Yaml => serde_saphyr::to_string(&inspected)?,
    })
}

/// `None` if there was no agent, or the VM has not started.
async fn guest_agent(dir: &VmDir) -> Option<Value> {
    let mut client = client::connect_guest(dir).await.ok()?;
    let info = client.info(GuestInfoRequest {}).await.ok()?.into_inner();
    let known = info.connected || info.agent.is_some();
    known.then(|| guest::info::all(&info))
}

fn read(path: &Path) -> Result<Value, Failure> {
    let file = File::open(path).map_err(Failure::at(path.display()))?;
    serde_json::from_reader(BufReader::new(file).take(MAX_STATE_FILE))
        .map_err(|error| Failure::Runtime(format!("{}: {}", path.display(), chain(&error))))
}
