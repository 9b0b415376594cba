//! `husk diff`.

use std::path::PathBuf;

use serde_json::Value;
use similar::TextDiff;

use super::apply::{checked_vms, files};
use crate::failure::{Failure, RUNTIME, visible};
use crate::machine::LocalStores;
use crate::output;
use crate::vm_ref;

/// Show what `husk apply` would change
///
/// Compares manifests with the objects that `husk apply` has stored, without their status. The values of Secrets are
/// not shown.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 if nothing would change, 1 if something would, 2 if a manifest
is wrong.

Example:
  husk diff -f vm.yaml")]
pub(crate) struct Args {
    /// A manifest, or a folder of manifests; `-` reads stdin
    #[arg(short, long = "filename", value_name = "FILE|DIR", required = true, value_hint = clap::ValueHint::AnyPath)]
    files: Vec<PathBuf>,

    /// Namespace for objects whose manifest names none
    #[arg(short, long, value_name = "NAMESPACE", value_parser = vm_ref::namespace)]
    namespace: Option<String>,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let given = files::read(&args.files, args.namespace.as_deref())?;
    let stores = LocalStores::locate()?;
    checked_vms(&stores, &given)?;
    let mut differs = false;
    for given in &given {
        // Claims are volumes of the store, not objects in it.
        if given.key().is_none() {
            continue;
        }
        let applied = stores.objects.compare(&given.object.value)?;
        let (old, new) = texts(applied.before.as_ref(), applied.object.value())?;
        let diff = TextDiff::from_lines(&old, &new);
        if diff.ratio() < 1.0 {
            differs = true;
            let name = applied.object.key.to_string();
            let text = diff
                .unified_diff()
                .header(&format!("a/{name}"), &format!("b/{name}"))
                .to_string();
            let lines: String = text.lines().map(|line| format!("{}\n", visible(line))).collect();
            output::print(&lines)?;
        }
    }
    match differs {
        true => Err(Failure::Ended(RUNTIME)),
        false => Ok(()),
    }
}

/// The manifests before and after as YAML. Values of Secrets are replaced: by `***`, and by another text where they
/// differ.
fn texts(before: Option<&Value>, after: &Value) -> Result<(String, String), Failure> {
    let mut old = before.cloned();
    let mut new = after.clone();
    if new["kind"] == "Secret" {
        for field in ["data", "stringData"] {
            let values = before.map(|before| before[field].clone()).unwrap_or_default();
            hide(new.get_mut(field), |key, value| values.get(key) != Some(value));
            hide(old.as_mut().and_then(|old| old.get_mut(field)), |_, _| false);
        }
    }
    if before.is_none() {
        // They are new with each comparison.
        for field in ["uid", "creationTimestamp"] {
            if let Some(metadata) = new["metadata"].as_object_mut() {
                metadata.remove(field);
            }
        }
    }
    let text = |value: &Value| serde_saphyr::to_string(value).map_err(Failure::at("write YAML"));
    Ok((old.as_ref().map_or(Ok(String::new()), text)?, text(&new)?))
}

fn hide(values: Option<&mut Value>, changed: impl Fn(&str, &Value) -> bool) {
    for (key, value) in values.and_then(Value::as_object_mut).into_iter().flatten() {
        *value = if changed(key, value) { "*** (after)" } else { "***" }.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secrets_are_not_shown() {
        let secret = |value: &str| json!({"kind": "Secret", "stringData": {"same": "1", "password": value}});
        let (old, new) = texts(Some(&secret("SECRET-old")), &secret("SECRET-new")).unwrap();
        assert!(!format!("{old}{new}").contains("SECRET"));
        let diff = TextDiff::from_lines(&old, &new);
        let changes = diff
            .iter_all_changes()
            .filter(|change| change.tag() != similar::ChangeTag::Equal);
        assert_eq!(changes.count(), 2);
        let (old, new) = texts(None, &secret("SECRET-new")).unwrap();
        assert!(
            old.is_empty() && new.contains("***") && !new.contains("SECRET"),
            "{new}"
        );
    }
}
