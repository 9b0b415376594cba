//! ioctls of namespace files (`ioctl_nsfs(2)`). They take no argument.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::io::Result;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// `NS_GET_USERNS`.
const GET_USER_NAMESPACE: Opcode = opcode::none(0xb7, 1);
/// `NS_GET_NSTYPE`.
const GET_KIND: Opcode = opcode::none(0xb7, 3);

/// `CLONE_NEW…` of a namespace's kind. An error if the file is no namespace.
pub(crate) fn kind(file: impl AsFd) -> Result<c_int> {
    // SAFETY: the request takes no argument and changes nothing.
    unsafe { ioctl(file, Request::<GET_KIND>) }
}

/// The user namespace that owns a namespace. An error if it is outside of the caller's own.
pub(crate) fn owner(file: impl AsFd) -> Result<OwnedFd> {
    // SAFETY: the request takes no argument and only creates a descriptor.
    let owner = unsafe { ioctl(file, Request::<GET_USER_NAMESPACE>) }?;
    // SAFETY: the kernel has just created the descriptor for this process, which owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(owner) })
}

/// A request whose answer is the number that ioctl(2) returns.
struct Request<const OPCODE: Opcode>;

// SAFETY: the requests of this module have no argument, so none is written, and the output is the number returned.
unsafe impl<const OPCODE: Opcode> Ioctl for Request<OPCODE> {
    type Output = c_int;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        OPCODE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(answer: IoctlOutput, _: *mut c_void) -> Result<c_int> {
        Ok(answer)
    }
}
