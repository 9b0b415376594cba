//! From FILE to the VMIs in it, or one line per wrong field.

use std::fs::File;
use std::io::{self, Read};

use husk_vmi::{FieldError, LoadError, Loaded, MANIFEST_LIMIT, Vmi};

use crate::failure::{Failure, chain, one_line};
use crate::vm_ref::VmRef;

/// The VMs of a manifest, read and validated.
#[derive(Debug)]
pub(crate) struct Manifest {
    /// In the order of the file, at least one.
    pub vmis: Vec<Vmi>,
    /// The other objects in it, for people.
    pub ignored: Vec<String>,
}

/// Reads and validates `source`, a path or `-` for stdin.
pub(crate) fn read(source: &str) -> Result<Manifest, Failure> {
    let text = match source {
        "-" => bounded(io::stdin().lock()),
        path => File::open(path).and_then(bounded),
    };
    let text = text.map_err(|error| Failure::Usage(format!("{source}: {}", chain(&error))))?;
    parse(source, &text)
}

fn bounded(reader: impl Read) -> io::Result<String> {
    let mut text = String::new();
    reader.take(MANIFEST_LIMIT as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn parse(source: &str, text: &str) -> Result<Manifest, Failure> {
    let loaded = husk_vmi::load(text).map_err(|error| match error {
        LoadError::Invalid(errors) => wrong(&errors),
        error => Failure::Usage(format!("{}: {error}", one_line(source))),
    })?;
    let mut manifest = Manifest {
        vmis: Vec::new(),
        ignored: Vec::new(),
    };
    for document in loaded {
        match document {
            Loaded::Vmi(vmi) => manifest.vmis.push(*vmi),
            Loaded::Other { kind, name, .. } => manifest.ignored.push(one_line(&format!("{kind} {name}"))),
        }
    }
    let errors: Vec<_> = manifest
        .vmis
        .iter()
        .filter_map(|vmi| husk_vmi::validate(vmi).err())
        .flatten()
        .collect();
    if errors.is_empty() {
        Ok(manifest)
    } else {
        Err(wrong(&errors))
    }
}

/// What is said about an object that is no VM.
pub(crate) fn left_alone(ignored: &str) -> String {
    format!("{ignored} is left alone: only VirtualMachineInstance and VirtualMachine are run")
}

/// One line per wrong field.
pub(crate) fn wrong(errors: &[FieldError]) -> Failure {
    Failure::Manifest(errors.iter().map(ToString::to_string).collect())
}

impl Manifest {
    /// Puts every VM into `namespace`; refused where the manifest names another one, as kubectl does.
    pub(crate) fn place(&mut self, namespace: &str) -> Result<(), Failure> {
        for vmi in &mut self.vmis {
            if vmi.namespace != namespace && vmi.namespace != crate::vm_ref::DEFAULT_NAMESPACE {
                return Err(Failure::Usage(format!(
                    "the namespace of {} in the manifest is {}, not {namespace}: leave --namespace out",
                    vmi.name, vmi.namespace
                )));
            }
            namespace.clone_into(&mut vmi.namespace);
        }
        Ok(())
    }

    /// The VMs' names; each must occur once.
    pub(crate) fn names(&self) -> Result<Vec<VmRef>, Failure> {
        let mut names: Vec<VmRef> = Vec::new();
        for vmi in &self.vmis {
            let name = VmRef {
                namespace: vmi.namespace.clone(),
                name: vmi.name.clone(),
            };
            if names.contains(&name) {
                return Err(Failure::Usage(format!("the manifest has two VMs named {name}")));
            }
            names.push(name);
        }
        Ok(names)
    }
}
