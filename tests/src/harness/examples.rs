//! The files of KubeVirt's `examples/`, with local images, and what becomes of each.

use super::context::TestContext;
use anyhow::{Context, Result, bail, ensure};
use regex::Regex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use toml_edit::DocumentMut;

/// What becomes of an example.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// Its objects are stored. Other examples may name them.
    Applies,
    /// Its VM runs.
    Runs,
    /// No VM runs, and the text says why.
    Refused(String),
}

/// One file of `examples/`.
#[derive(Debug)]
pub struct Example {
    pub file: String,
    pub verdict: Verdict,
    /// The objects, with the images swapped.
    pub path: PathBuf,
    /// Name of the first object.
    pub name: String,
    pub kind: String,
}

/// Images in place of those that the examples name.
#[derive(Debug)]
pub struct Images {
    /// A containerDisk that boots.
    pub disk: &'static str,
    /// An image with `/boot/vmlinuz` and `/boot/initrd`.
    pub kernel: &'static str,
}

/// All files in `folder`, in order of their names, each with its verdict in the TOML text `verdicts`.
///
/// # Errors
/// A file lacks a verdict, or a verdict its file.
pub fn read(ctx: &TestContext, folder: &Path, verdicts: &str, images: &Images) -> Result<Vec<Example>> {
    let mut verdicts = self::verdicts(verdicts)?;
    let image = Regex::new(r"registry:5000/[\w./-]+:\w+")?;
    let mut examples = Vec::new();
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let path = entry?.path();
        let file = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if !file.ends_with(".yaml") {
            continue;
        }
        let verdict = verdicts.remove(&file);
        let verdict = verdict.with_context(|| format!("there is no verdict on {file}"))?;
        let mut content = std::fs::read_to_string(&path)?;
        if file == "vmi-kernel-boot.yaml" {
            content = image.replace_all(&content, images.kernel).replace("-virt", "");
            content = content.replace("/boot/initramfs", "/boot/initrd");
        }
        content = image.replace_all(&content, images.disk).into_owned();
        let field = |pattern: &str| -> Result<String> {
            let found = Regex::new(pattern)?
                .captures(&content)
                .map(|found| found[1].to_owned());
            found.with_context(|| format!("{file} does not match {pattern}"))
        };
        let (kind, name) = (
            field(r"(?m)^kind: (\S+)")?,
            field(r"(?m)^metadata:(?:\n  .*)*?\n  name: (\S+)")?,
        );
        let path = ctx.path(&file);
        std::fs::write(&path, content)?;
        examples.push(Example {
            file,
            verdict,
            path,
            name,
            kind,
        });
    }
    let left: Vec<_> = verdicts.into_keys().collect();
    ensure!(left.is_empty(), "{} has no {}", folder.display(), left.join(", "));
    examples.sort_by(|one, other| one.file.cmp(&other.file));
    Ok(examples)
}

fn verdicts(text: &str) -> Result<BTreeMap<String, Verdict>> {
    let document: DocumentMut = text.parse()?;
    let mut verdicts = BTreeMap::new();
    for (file, value) in document.iter() {
        let refused = value.get("refused").and_then(|text| text.as_str());
        let verdict = match (value.as_str(), refused) {
            (Some("applies"), _) => Verdict::Applies,
            (Some("runs"), _) => Verdict::Runs,
            (_, Some(text)) => Verdict::Refused(text.to_owned()),
            _ => bail!("the verdict on {file} is neither \"applies\", \"runs\" nor {{ refused = … }}"),
        };
        verdicts.insert(file.to_owned(), verdict);
    }
    Ok(verdicts)
}
