//! `husk get`.

mod rows;
mod status;

use husk_claims::Claim;
use husk_monitor::state::RuntimeDir;
use husk_objects::{Kind, Objects, StoredObject};
use serde_json::{Value, json};

use super::delete::{is_claim, unknown_kind};
use crate::failure::{Failure, RUNTIME};
use crate::machine::status::{self as vm_status, VmStatus};
use crate::machine::systemd::{Systemd, Unit, Units};
use crate::machine::{LocalStores, vm};
use crate::vm_ref::{self, DEFAULT_NAMESPACE, VmRef};
use crate::vm_view::VmView;
use crate::{live_vm, output, vm_view};

/// Show objects of `husk apply`, with what their VMs and volumes do now
///
/// KIND is vm, vmi, dv, pvc, secret, configmap, virtualmachineinstancetype, virtualmachinepreference or a cluster-wide
/// one of these, as kubectl takes it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0, or 1 if a named object does not exist.

Examples:
  husk get vm
  husk get vm demo -o yaml
  husk get dv --all-namespaces
  husk get vm -o name | xargs husk delete vm")]
pub(crate) struct Args {
    /// Kind of the objects
    #[arg(value_name = "KIND")]
    kind: String,

    /// Their names; all without one
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Namespace of the objects
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace, conflicts_with = "all_namespaces")]
    namespace: Option<String>,

    /// Objects of all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,

    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Table
    #[default]
    Table,
    /// The manifests with their status, as YAML
    Yaml,
    /// The same as JSON: one object, or a List
    Json,
    /// One name per line
    Name,
}

/// The state of the machine, from which objects are shown.
pub(super) struct Known {
    stores: LocalStores,
    objects: Objects,
    units: Units,
    views: Vec<VmView>,
}

impl Known {
    fn gather() -> Result<Known, Failure> {
        let stores = LocalStores::locate()?;
        let runtime = RuntimeDir::locate()?;
        Ok(Known {
            objects: stores.read()?,
            stores,
            // Without systemd no VM of `husk apply` runs.
            units: Systemd::find().map_or_else(|_| Ok(Units::default()), Systemd::units)?,
            views: live_vm::block_on(vm_view::all(runtime.list()?))?,
        })
    }

    fn unit(&self, name: &VmRef) -> Unit {
        self.units.vms.get(name).cloned().unwrap_or_default()
    }

    fn view(&self, name: &VmRef) -> Option<&VmView> {
        vm_status::view(&self.views, name, &self.unit(name))
    }

    /// The state of a VM.
    fn vm_status(&self, stored: &StoredObject) -> VmStatus {
        let name = vm::name(&stored.key);
        vm_status::of(stored, &self.unit(&name), self.view(&name))
    }
}

/// One object to show.
enum Shown<'a> {
    Object(&'a StoredObject),
    Claim(&'a Claim),
}

impl Shown<'_> {
    fn namespace(&self) -> &str {
        match self {
            Shown::Object(object) => &object.key.namespace,
            Shown::Claim(claim) => &claim.object.metadata.namespace,
        }
    }

    fn name(&self) -> &str {
        match self {
            Shown::Object(object) => &object.key.name,
            Shown::Claim(claim) => &claim.object.metadata.name,
        }
    }
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let kind = Kind::of_word(&args.kind);
    if kind.is_none() && !is_claim(&args.kind) {
        return Err(Failure::Usage(unknown_kind(&args.kind)));
    }
    let known = Known::gather()?;
    let mut claims = Vec::new();
    if kind.is_none() {
        for claim in known.stores.claims.list()? {
            match claim {
                Ok(claim) => claims.push(claim),
                Err(error) => crate::failure::print_warning(&error.to_string()),
            }
        }
    }
    let mut shown: Vec<Shown<'_>> = match kind {
        // The VMI of a VirtualMachine is not stored.
        Some(kind) => known
            .objects
            .objects
            .iter()
            .filter(|object| {
                object.key.kind == kind || kind == Kind::VirtualMachineInstance && is_run(&known, object)
            })
            .map(Shown::Object)
            .collect(),
        None => claims.iter().map(Shown::Claim).collect(),
    };
    let namespace = args.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
    if !args.all_namespaces {
        shown.retain(|shown| shown.namespace().is_empty() || shown.namespace() == namespace);
    }
    let mut done = Ok(());
    for name in &args.names {
        if !shown.iter().any(|shown| shown.name() == name) {
            let word = kind.map_or("persistentvolumeclaim".to_owned(), |kind| {
                kind.name().to_ascii_lowercase()
            });
            Failure::Runtime(format!("{word} \"{name}\" not found")).report();
            done = Err(Failure::Ended(RUNTIME));
        }
    }
    if !args.names.is_empty() {
        shown.retain(|shown| args.names.iter().any(|name| name == shown.name()));
    }
    if shown.is_empty() && args.output == Format::Table {
        if args.names.is_empty() {
            eprintln!(
                "No resources found{}",
                if args.all_namespaces {
                    ""
                } else {
                    " in this namespace"
                }
            );
        }
        return done;
    }
    let text = match args.output {
        Format::Table => rows::table(&known, kind, &shown, args.all_namespaces),
        Format::Name => shown.iter().map(|shown| format!("{}\n", shown.name())).collect(),
        Format::Json => output::json(&list(&known, kind, &shown, args.names.len() == 1)?)?,
        Format::Yaml => {
            let value = list(&known, kind, &shown, args.names.len() == 1)?;
            serde_saphyr::to_string(&value).map_err(Failure::at("write YAML"))?
        }
    };
    output::print(&text)?;
    done
}

/// True for a VirtualMachine that has a VMI now.
fn is_run(known: &Known, object: &StoredObject) -> bool {
    object.key.kind == Kind::VirtualMachine && known.vm_status(object).phase.is_some()
}

/// The objects with their status: one, or a List.
fn list(known: &Known, kind: Option<Kind>, shown: &[Shown<'_>], one: bool) -> Result<Value, Failure> {
    let mut items: Vec<Value> = shown
        .iter()
        .map(|shown| match shown {
            Shown::Object(object) => status::object(known, kind, object),
            Shown::Claim(claim) => status::claim(claim),
        })
        .collect();
    match items.pop() {
        Some(item) if one && items.is_empty() => Ok(item),
        item => {
            items.extend(item);
            Ok(json!({"apiVersion": "v1", "kind": "List", "items": items}))
        }
    }
}
