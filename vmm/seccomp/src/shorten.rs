//! Shortens BPF programs: seccompiler takes five instructions for each call that is allowed with any arguments; one is
//! enough.
//!
//! The kernel translates a program to machine code whenever a thread installs it, tries it for every call number
//! (Linux 5.11 and newer), and executes it at each call whose arguments it checks.

use seccompiler::sock_filter;

/// Instruction classes and the unconditional jump (linux/bpf_common.h).
const CLASS: u16 = 0x07;
const JUMP: u16 = 0x05;
const RETURN: u16 = 0x06;
const ALWAYS: u16 = 0x05;

/// Longest conditional jump.
const FAR: usize = u8::MAX as usize;

/// The same program with fewer instructions.
pub fn shorten(mut program: Vec<sock_filter>) -> Vec<sock_filter> {
    loop {
        let len = program.len();
        program = without_unreachable(threaded(program));
        if program.len() == len {
            return program;
        }
    }
}

/// Lets conditional jumps lead past unconditional ones, and to the last of equal returns within their range.
fn threaded(mut program: Vec<sock_filter>) -> Vec<sock_filter> {
    for at in 0..program.len() {
        if !is_conditional(&program[at]) {
            continue;
        }
        let further = |distance: u8| -> u8 {
            let target = last_equal(&program, at, follow(&program, at + 1 + usize::from(distance)));
            u8::try_from(target - at - 1).unwrap_or(distance)
        };
        let (jt, jf) = (further(program[at].jt), further(program[at].jf));
        (program[at].jt, program[at].jf) = (jt, jf);
    }
    program
}

/// The instruction that is executed when control comes to `at`: behind all unconditional jumps.
fn follow(program: &[sock_filter], mut at: usize) -> usize {
    while program[at].code == ALWAYS {
        at += 1 + program[at].k as usize;
    }
    at
}

/// If there is a return at `target`: the last one with the same value that a jump at `from` reaches.
fn last_equal(program: &[sock_filter], from: usize, target: usize) -> usize {
    let wanted = &program[target];
    if wanted.code & CLASS != RETURN {
        return target;
    }
    let reached = program.len().min(from + 2 + FAR);
    let equal = |at: &usize| program[*at].code == wanted.code && program[*at].k == wanted.k;
    (target..reached).rev().find(equal).unwrap_or(target)
}

/// Leaves out unreachable instructions, and unconditional jumps to the instruction that follows.
fn without_unreachable(mut program: Vec<sock_filter>) -> Vec<sock_filter> {
    let mut kept = vec![false; program.len()];
    let mut open = vec![0];
    while let Some(at) = open.pop() {
        if !std::mem::replace(&mut kept[at], true) {
            open.extend(successors(&program[at], at));
        }
    }
    for at in 0..program.len() {
        if program[at].code == ALWAYS {
            let target = at + 1 + program[at].k as usize;
            kept[at] &= kept[at + 1..target].contains(&true);
        }
    }
    // Place of each instruction; one that is left out has that of the next kept one.
    let mut places = Vec::with_capacity(program.len());
    let mut place = 0;
    for kept in &kept {
        places.push(place);
        place += usize::from(*kept);
    }
    for at in 0..program.len() {
        let distance = |skipped: usize| places[at + 1 + skipped].saturating_sub(places[at] + 1);
        let instruction = program[at].clone();
        if instruction.code == ALWAYS {
            program[at].k = distance(instruction.k as usize) as u32;
        } else if is_conditional(&instruction) {
            // No distance grows.
            program[at].jt = distance(instruction.jt.into()) as u8;
            program[at].jf = distance(instruction.jf.into()) as u8;
        }
    }
    let mut keep = kept.into_iter();
    program.retain(|_| keep.next().unwrap_or(true));
    program
}

fn successors(instruction: &sock_filter, at: usize) -> Vec<usize> {
    let next = at + 1;
    match instruction.code {
        ALWAYS => vec![next + instruction.k as usize],
        code if code & CLASS == RETURN => Vec::new(),
        _ if is_conditional(instruction) => {
            vec![
                next + usize::from(instruction.jt),
                next + usize::from(instruction.jf),
            ]
        }
        _ => vec![next],
    }
}

fn is_conditional(instruction: &sock_filter) -> bool {
    instruction.code & CLASS == JUMP && instruction.code != ALWAYS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile;
    use crate::role::ThreadRole;
    use crate::tables::allowed_syscalls;

    /// The words of `struct seccomp_data` (linux/seccomp.h): number, architecture, instruction pointer, six arguments.
    type Call = [u32; 16];

    const X86_64: u32 = 0xc000_003e;
    const I386: u32 = 0x4000_0003;
    const X32: u32 = 0x4000_0000;

    /// Executes a program; seccompiler emits no other instructions.
    fn execute(program: &[sock_filter], call: &Call) -> u32 {
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at].clone();
            at += 1;
            let mut jump = |holds: bool| at += usize::from(if holds { jt } else { jf });
            match code {
                0x20 => accumulator = call[k as usize / 4],
                0x54 => accumulator &= k,
                0x05 => at += k as usize,
                0x15 => jump(accumulator == k),
                0x25 => jump(accumulator > k),
                0x35 => jump(accumulator >= k),
                0x45 => jump(accumulator & k != 0),
                0x06 => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    /// Calls with arguments that a role allows, and with others.
    fn calls(role: ThreadRole) -> Vec<Call> {
        let mut calls = Vec::new();
        for number in (0..600).chain([X32, u32::MAX]) {
            for architecture in [X86_64, I386] {
                let mut call = [0; 16];
                (call[0], call[1]) = (number, architecture);
                calls.push(call);
                call[4..].fill(u32::MAX);
                calls.push(call);
            }
        }
        for allowed in allowed_syscalls(role) {
            let mut call = [0; 16];
            (call[0], call[1]) = (u32::try_from(allowed.number).expect("a number"), X86_64);
            for condition in allowed.conditions.into_iter().flatten() {
                call[4 + 2 * usize::from(condition.argument)] = condition.value;
            }
            calls.push(call);
            for word in 4..16 {
                for bit in [0, 7, 31] {
                    let mut other = call;
                    other[word] ^= 1 << bit;
                    calls.push(other);
                }
            }
        }
        calls
    }

    #[test]
    fn a_shorter_program_decides_the_same() {
        for role in ThreadRole::ALL {
            let long = compile::program(role).expect("a program");
            let short = shorten(long.clone());
            assert!(
                short.len() * 2 < long.len(),
                "{role:?}: {} of {}",
                short.len(),
                long.len()
            );
            let calls = calls(role);
            let allowed = |call: &&Call| execute(&long, call) == 0x7fff_0000;
            assert!(calls.iter().filter(allowed).count() > 10, "{role:?}");
            for call in calls {
                assert_eq!(
                    execute(&short, &call),
                    execute(&long, &call),
                    "{role:?} {call:x?}"
                );
            }
        }
    }

    #[test]
    fn a_jump_goes_no_further_than_it_can() {
        let instruction = |code, jt, jf, k| sock_filter { code, jt, jf, k };
        let mut program = vec![instruction(0x20, 0, 0, 0)];
        // Each call returns its own number, so that no return can be shared.
        for number in 0..300 {
            program.push(instruction(0x15, 0, 1, number));
            program.push(instruction(ALWAYS, 0, 0, 1));
            program.push(instruction(ALWAYS, 0, 0, 1));
            program.push(instruction(RETURN, 0, 0, number));
        }
        program.push(instruction(RETURN, 0, 0, 1000));
        let short = shorten(program.clone());
        assert_eq!(short.len(), 602);
        for number in 0..310 {
            let mut call = [0; 16];
            call[0] = number;
            assert_eq!(execute(&short, &call), execute(&program, &call), "{number}");
        }
    }
}
