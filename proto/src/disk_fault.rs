//! The reason why a disk was refused, in the details of a status.

use prost::Message;
use tonic::{Code, Status};

use crate::vmm::v1::DiskFault;

impl DiskFault {
    /// Creates a status with this message and the fault in its details.
    #[must_use]
    pub fn to_status(&self, message: impl Into<String>) -> Status {
        Status::with_details(Code::InvalidArgument, message, self.encode_to_vec().into())
    }

    /// Reads the fault from a status's details.
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let fault = Self::decode(status.details()).ok()?;
        (!fault.disk.is_empty()).then_some(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_travels_with_its_status() {
        let fault = DiskFault {
            disk: "root".into(),
            reason: "no good".into(),
        };
        let status = fault.to_status("disk root: no good");
        assert_eq!(status.message(), "disk root: no good");
        assert_eq!(DiskFault::from_status(&status), Some(fault));
        assert_eq!(DiskFault::from_status(&Status::internal("x")), None);
        let other = Status::with_details(Code::Internal, "x", b"\xff\xff"[..].into());
        assert_eq!(DiskFault::from_status(&other), None);
    }
}
