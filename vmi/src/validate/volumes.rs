//! Rules on volumes.

use std::collections::HashMap;

use super::limits::image_path_fault;
use crate::field::FieldError;
use crate::load::Vmi;
use crate::plan::volume_source::decode;
use crate::types::{CloudInit, HostDisk, Volume};

/// Maximum size of inline cloud-init data in bytes.
const CLOUD_INIT_LIMIT: usize = 2048;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("volumes");
    let volumes = &vmi.spec.volumes;
    let mut names = HashMap::new();
    for (i, volume) in volumes.iter().enumerate() {
        let path = format!("{list}[{i}]");
        if let Some(other) = names.get(&volume.name) {
            let text = format!("{path} and {list}[{other}] must not have the same Name.");
            errors.push(FieldError::invalid(format!("{path}.name"), text));
        }
        names.insert(&volume.name, i);
        one(volume, &path, errors);
    }
    let at_most_one = [
        (
            "serviceAccount",
            volumes.iter().filter(|v| v.service_account.is_some()).count(),
        ),
        (
            "downwardMetric",
            volumes.iter().filter(|v| v.downward_metrics.is_some()).count(),
        ),
        (
            "memory dump",
            volumes.iter().filter(|v| v.memory_dump.is_some()).count(),
        ),
    ];
    for (kind, _) in at_most_one.into_iter().filter(|(_, count)| *count > 1) {
        errors.push(FieldError::invalid(
            &list,
            format!("{list} must have max one {kind} volume set"),
        ));
    }
}

fn one(volume: &Volume, path: &str, errors: &mut Vec<FieldError>) {
    if volume.sources() != 1 {
        errors.push(FieldError::invalid(
            path,
            format!("{path} must have exactly one source type set"),
        ));
    }
    if volume
        .data_volume
        .as_ref()
        .is_some_and(|data| data.name.is_empty())
    {
        errors.push(FieldError::required(
            format!("{path}.name"),
            "DataVolume 'name' must be set",
        ));
    }
    let names = [
        ("configMap.name", volume.config_map.as_ref().map(|v| &v.name)),
        (
            "secret.secretName",
            volume.secret.as_ref().map(|v| &v.secret_name),
        ),
        (
            "serviceAccount.serviceAccountName",
            volume.service_account.as_ref().map(|v| &v.service_account_name),
        ),
    ];
    for (field, _) in names
        .into_iter()
        .filter(|(_, name)| name.is_some_and(String::is_empty))
    {
        let path = format!("{path}.{field}");
        errors.push(FieldError::invalid(&path, format!("{path} is a required field")));
    }
    let image_path = volume
        .container_disk
        .as_ref()
        .and_then(|disk| disk.path.as_deref());
    if let Some(fault) = image_path.filter(|p| !p.is_empty()).and_then(image_path_fault) {
        let path = format!("{path}.containerDisk");
        errors.push(FieldError::invalid(&path, format!("{path} {fault}")));
    }
    if let Some(data) = &volume.cloud_init_no_cloud {
        cloud_init(data, &format!("{path}.cloudInitNoCloud"), errors);
    }
    if let Some(data) = &volume.cloud_init_config_drive {
        cloud_init(data, &format!("{path}.cloudInitConfigDrive"), errors);
    }
    if let Some(disk) = &volume.host_disk {
        host_disk(disk, &format!("{path}.hostDisk"), errors);
    }
}

fn cloud_init(data: &CloudInit, path: &str, errors: &mut Vec<FieldError>) {
    let kinds = [
        (
            "userdata",
            "userDataBase64",
            "UserDataSecretRef",
            &data.user_data,
            &data.user_data_base64,
            &data.secret_ref,
        ),
        (
            "networkdata",
            "networkDataBase64",
            "NetworkDataSecretRef",
            &data.network_data,
            &data.network_data_base64,
            &data.network_data_secret_ref,
        ),
    ];
    let mut any = false;
    for (kind, field, secret_field, plain, encoded, secret) in kinds {
        let plain = plain.as_deref().filter(|text| !text.is_empty());
        let encoded = encoded.as_deref().filter(|text| !text.is_empty());
        let sources =
            usize::from(plain.is_some()) + usize::from(encoded.is_some()) + usize::from(secret.is_some());
        any |= sources > 0;
        if sources > 1 {
            let source = if kind == "userdata" {
                "userdatasource"
            } else {
                "networkdata source"
            };
            errors.push(FieldError::invalid(
                path,
                format!("{path} must have only one {source} set."),
            ));
        }
        let decoded = encoded.map(decode);
        if decoded == Some(None) {
            let field = format!("{path}.{field}");
            errors.push(FieldError::invalid(
                &field,
                format!("{field} is not a valid base64 value."),
            ));
        }
        let length = plain
            .map(str::len)
            .max(decoded.flatten().map(|data| data.len()))
            .unwrap_or(0);
        if length > CLOUD_INIT_LIMIT {
            let text = format!(
                "{path} {kind} exceeds {CLOUD_INIT_LIMIT} byte limit. Should use {secret_field} for larger data."
            );
            errors.push(FieldError::invalid(path, text));
        }
    }
    if !any {
        let text = format!("{path} must have at least one userdatasource or one networkdatasource set.");
        errors.push(FieldError::invalid(path, text));
    }
}

fn host_disk(disk: &HostDisk, path: &str, errors: &mut Vec<FieldError>) {
    if disk.path.is_empty() {
        let field = format!("{path}.path");
        errors.push(FieldError::not_found(
            &field,
            format!("{field} is required for hostDisk volume"),
        ));
    }
    let kind = disk.disk_type.as_str();
    if !matches!(kind, "Disk" | "DiskOrCreate") {
        let field = format!("{path}.type");
        let text = format!("{field} has invalid value '{kind}', allowed are 'Disk' or 'DiskOrCreate'");
        errors.push(FieldError::invalid(field, text));
    }
    if disk.capacity.is_some() && kind != "DiskOrCreate" {
        let field = format!("{path}.capacity");
        let text = format!("{field} is allowed to pass only with {path}.type equal to 'DiskOrCreate'");
        errors.push(FieldError::invalid(field, text));
    }
}
