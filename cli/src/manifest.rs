//! Reads the VMIs of a manifest file, or reports one line per invalid field.

use std::fs::File;
use std::io::{self, Read};

use husk_vmi::{FieldError, LoadError, Loaded, MANIFEST_LIMIT, Vmi};

use crate::failure::{Failure, chain, one_line};
use crate::vm_ref::VmRef;

/// The validated VMs of a manifest.
#[derive(Debug)]
pub(crate) struct Manifest {
    /// In the order of the file, at least one.
    pub vmis: Vec<Vmi>,
    /// Kind and name of the other objects in it.
    pub ignored: Vec<String>,
    /// The file name, if messages must name it.
    file: Option<String>,
}

/// Reads and validates `source`, a path or `-` for stdin. Messages name the source if it is one of several or has
/// several documents.
pub(crate) fn read(source: &str, one_of_several: bool) -> Result<Manifest, Failure> {
    let (name, text) = text(source)?;
    parse(name, &text, one_of_several)
}

/// Like [`read`] for a single manifest; returns its text too.
pub(crate) fn read_text(source: &str) -> Result<(String, Manifest), Failure> {
    let (name, text) = text(source)?;
    let manifest = parse(name, &text, false)?;
    Ok((text, manifest))
}

/// Display name and content of a source.
pub(crate) fn text(source: &str) -> Result<(&str, String), Failure> {
    let (name, text) = match source {
        "-" => ("stdin", bounded(io::stdin().lock())),
        path => (path, File::open(path).and_then(bounded)),
    };
    let text = text.map_err(|error| Failure::Usage(format!("{name}: {}", chain(&error))))?;
    Ok((name, text))
}

fn bounded(reader: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    reader.take(MANIFEST_LIMIT as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MANIFEST_LIMIT {
        // Truncated at the limit, maybe inside a character: `load` only looks at the length.
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other("not valid UTF-8"))
}

fn parse(source: &str, text: &str, one_of_several: bool) -> Result<Manifest, Failure> {
    let mut manifest = Manifest {
        vmis: Vec::new(),
        ignored: Vec::new(),
        file: one_of_several.then(|| source.to_owned()),
    };
    let loaded = match husk_vmi::load(text) {
        Ok(loaded) => loaded,
        Err(LoadError::Invalid(documents)) => {
            if documents.iter().any(|bad| bad.document.is_some()) {
                manifest.file = Some(source.to_owned());
            }
            let lines = documents
                .iter()
                .flat_map(|bad| manifest.lines(bad.document.as_deref(), &bad.errors));
            return Err(Failure::Manifest(lines.collect()));
        }
        Err(error) => return Err(Failure::Usage(format!("{source}: {error}"))),
    };
    if loaded.len() > 1 {
        manifest.file = Some(source.to_owned());
    }
    for document in loaded {
        match document {
            Loaded::Vmi(vmi) => manifest.vmis.push(*vmi),
            Loaded::Other { kind, name, .. } => manifest.ignored.push(one_line(&format!("{kind} {name}"))),
        }
    }
    let mut lines = Vec::new();
    for vmi in &manifest.vmis {
        if let Err(errors) = husk_vmi::validate(vmi) {
            lines.extend(manifest.error_lines(vmi, &errors));
        }
    }
    if lines.is_empty() {
        Ok(manifest)
    } else {
        Err(Failure::Manifest(lines))
    }
}

impl Manifest {
    /// One line for each object that is not a VM.
    pub(crate) fn warnings_of_ignored(&self) -> impl Iterator<Item = String> {
        let prefix = self.prefix(None);
        self.ignored.iter().map(move |ignored| {
            format!(
                "{prefix}{ignored} is ignored: only VirtualMachineInstance and VirtualMachine are supported"
            )
        })
    }

    /// Prefix of messages about a VM: the file and the document, if there are several.
    pub(crate) fn prefix_of(&self, vmi: &Vmi) -> String {
        self.prefix(vmi.document.as_deref())
    }

    /// One line for each invalid field of a VM.
    pub(crate) fn error_lines(&self, vmi: &Vmi, errors: &[FieldError]) -> Vec<String> {
        self.lines(vmi.document.as_deref(), errors)
    }

    fn lines(&self, document: Option<&str>, errors: &[FieldError]) -> Vec<String> {
        let prefix = self.prefix(document);
        errors.iter().map(|error| format!("{prefix}{error}")).collect()
    }

    fn prefix(&self, document: Option<&str>) -> String {
        let parts = [self.file.as_deref(), document];
        parts
            .into_iter()
            .flatten()
            .map(|part| format!("{part}: "))
            .collect()
    }

    /// Sets the namespace of every VM. Fails if the manifest names another one, as kubectl does.
    pub(crate) fn set_namespace(&mut self, namespace: &str) -> Result<(), Failure> {
        for vmi in &mut self.vmis {
            if vmi.namespace != namespace && vmi.namespace != crate::vm_ref::DEFAULT_NAMESPACE {
                return Err(Failure::Usage(format!(
                    "the manifest puts {} in the namespace {}, not {namespace}: omit --namespace",
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
                let prefix = self.prefix(None);
                return Err(Failure::Usage(format!("{prefix}two VMs have the name {name}")));
            }
            names.push(name);
        }
        Ok(names)
    }
}
