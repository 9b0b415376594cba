//! gRPC client of Husk's monitor, on one connection like QEMU's.

use crate::monitor;
use anyhow::{Context, Result, ensure};
use husk_proto::shim::v1::add_volume_request::Cache;
use husk_proto::shim::v1::pod_client::PodClient;
use husk_proto::shim::v1::{AddVolumeRequest, RemoveVolumeRequest};
use std::path::Path;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::Channel;

/// A connection to the monitor.
#[derive(Debug)]
pub struct Pod {
    runtime: Runtime,
    client: PodClient<Channel>,
}

impl Pod {
    /// Connects to the monitor.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(monitor::connect(socket))?;
        Ok(Self { runtime, client })
    }

    /// Adds the image as a volume.
    pub fn add(&mut self, name: &str, image: &Path) -> Result<()> {
        let request = AddVolumeRequest {
            name: name.to_owned(),
            path: image.to_string_lossy().into_owned(),
            serial: name.to_owned(),
            cache: Cache::Writeback.into(),
            read_only: false,
            fd: None,
        };
        let added = self.runtime.block_on(self.client.add_volume(request));
        added.context("AddVolume")?;
        Ok(())
    }

    /// Removes a volume.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        let request = RemoveVolumeRequest {
            name: name.to_owned(),
        };
        let removed = self.runtime.block_on(self.client.remove_volume(request));
        let error = removed.context("RemoveVolume")?.into_inner().flush_error;
        ensure!(error.is_empty(), "RemoveVolume: {error}");
        Ok(())
    }
}
