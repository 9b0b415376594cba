//! The tables of `husk get`, with the columns that kubectl prints.

use husk_objects::{Kind, StoredObject};
use jiff::Timestamp;

use super::{Known, Shown};
use crate::machine::{phase, vm};
use crate::output;

/// The table of objects of one kind; `None` stands for claims.
pub(super) fn table(known: &Known, kind: Option<Kind>, shown: &[Shown<'_>], namespaces: bool) -> String {
    let header: &[&str] = match kind {
        Some(Kind::VirtualMachine) => &["NAME", "AGE", "STATUS", "READY"],
        Some(Kind::VirtualMachineInstance) => &["NAME", "AGE", "PHASE", "IP", "READY"],
        Some(Kind::DataVolume) => &["NAME", "PHASE", "PROGRESS", "AGE"],
        Some(Kind::Secret) => &["NAME", "TYPE", "DATA", "AGE"],
        Some(Kind::ConfigMap) => &["NAME", "DATA", "AGE"],
        Some(_) => &["NAME", "AGE"],
        None => &["NAME", "STATUS", "CAPACITY", "USED", "ACCESS MODES"],
    };
    let mut rows = vec![header.iter().map(|title| (*title).to_owned()).collect::<Vec<_>>()];
    for one in shown {
        rows.push(match one {
            Shown::Object(object) => cells(known, kind, object),
            Shown::Claim(claim) => vec![
                claim.object.metadata.name.clone(),
                "Bound".to_owned(),
                output::bytes(claim.size),
                output::bytes(claim.allocated),
                modes(claim),
            ],
        });
    }
    if namespaces {
        for (row, namespace) in rows.iter_mut().zip(
            ["NAMESPACE"]
                .into_iter()
                .chain(shown.iter().map(Shown::namespace)),
        ) {
            row.insert(0, namespace.to_owned());
        }
    }
    columns(&rows)
}

fn cells(known: &Known, kind: Option<Kind>, object: &StoredObject) -> Vec<String> {
    let name = object.key.name.clone();
    let age = age(object.created(), Timestamp::now());
    let count = |fields: &[&str]| {
        let value = object.value();
        let maps = fields.iter().filter_map(|field| value.get(*field)?.as_object());
        maps.map(serde_json::Map::len).sum::<usize>().to_string()
    };
    match kind {
        Some(Kind::VirtualMachine) => {
            let status = known.vm_status(object);
            vec![name, age, status.printable, flag(status.ready)]
        }
        Some(Kind::VirtualMachineInstance) => {
            let status = known.vm_status(object);
            let view = known.view(&vm::name(&object.key));
            let address = view
                .and_then(|view| view.address())
                .unwrap_or_default()
                .to_owned();
            let phase = status.phase.unwrap_or_default().to_owned();
            vec![name, age, phase, address, flag(status.ready)]
        }
        Some(Kind::DataVolume) => {
            let phase = phase(&known.machine, &known.units, object);
            vec![name, phase.phase.to_owned(), phase.progress, age]
        }
        Some(Kind::Secret) => {
            let of_type = object.value()["type"].as_str().unwrap_or("Opaque").to_owned();
            vec![name, of_type, count(&["data", "stringData"]), age]
        }
        Some(Kind::ConfigMap) => vec![name, count(&["data", "binaryData"]), age],
        _ => vec![name, age],
    }
}

fn flag(ready: bool) -> String {
    if ready { "True" } else { "False" }.to_owned()
}

fn modes(claim: &husk_claims::Claim) -> String {
    let modes = claim.object.spec.access_modes.iter();
    modes.map(|mode| mode.short_name()).collect::<Vec<_>>().join(",")
}

/// Left-aligned columns, three spaces apart, as kubectl prints them.
fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..count)
        .map(|column| width(column).unwrap_or_default())
        .collect();
    let mut text = String::new();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}   "));
        text.push_str(cells.collect::<String>().trim_end());
        text.push('\n');
    }
    text
}

/// An age as kubectl prints it: two units for short ones, else one.
fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    let Some(since) = since else {
        return "<unknown>".to_owned();
    };
    let seconds = (now.as_second() - since.as_second()).max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => format!("{minutes}m{}s", seconds % 60),
        () if minutes < 180 => format!("{minutes}m"),
        () if hours < 8 => format!("{hours}h{}m", minutes % 60),
        () if hours < 48 => format!("{hours}h"),
        () if days < 8 => format!("{days}d{}h", hours % 24),
        () => format!("{days}d"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_those_of_kubectl() {
        let now = Timestamp::from_second(10_000_000).unwrap();
        let at = |seconds: i64| age(Timestamp::from_second(10_000_000 - seconds).ok(), now);
        let seconds = [0, 119, 150, 3600, 11_000, 90_000, 200_000, 800_000];
        let texts = ["0s", "119s", "2m30s", "60m", "3h3m", "25h", "2d7h", "9d"];
        assert_eq!(seconds.map(at), texts);
        assert_eq!(age(None, now), "<unknown>");
    }

    #[test]
    fn columns_are_three_spaces_apart() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let text = columns(&[row(["NAME", "AGE"]), row(["a-long-name", ""])]);
        assert_eq!(text, "NAME          AGE\na-long-name\n");
    }
}
