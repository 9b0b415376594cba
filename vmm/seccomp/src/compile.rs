//! Compiles the tables to BPF programs, at build time and in tests.

use std::collections::BTreeMap;
use std::error::Error;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::role::ThreadRole;
use crate::tables::{AllowedSyscall, ArgCondition, REFUSED, allowed_syscalls};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn condition(condition: ArgCondition) -> Result<SeccompCondition, Box<dyn Error>> {
    let operator = match condition.mask {
        u32::MAX => SeccompCmpOp::Eq,
        mask => SeccompCmpOp::MaskedEq(mask.into()),
    };
    let length = SeccompCmpArgLen::Dword;
    Ok(SeccompCondition::new(
        condition.argument,
        length,
        operator,
        condition.value.into(),
    )?)
}

/// An empty list of rules stands for any arguments.
fn rules(calls: &[AllowedSyscall]) -> Result<Rules, Box<dyn Error>> {
    let mut alternatives: BTreeMap<i64, Vec<AllowedSyscall>> = BTreeMap::new();
    for call in calls {
        let list = alternatives.entry(call.number).or_default();
        if !list.contains(call) {
            list.push(*call);
        }
    }
    let mut rules = Rules::new();
    for (number, list) in alternatives {
        let mut chain = Vec::new();
        if list.iter().all(|call| call.conditions[0].is_some()) {
            for call in list {
                let conditions = call.conditions.into_iter().flatten().map(condition);
                chain.push(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?);
            }
        }
        rules.insert(number, chain);
    }
    Ok(rules)
}

fn compile(rules: Rules, action: SeccompAction) -> Result<BpfProgram, Box<dyn Error>> {
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, action, TargetArch::x86_64)?;
    Ok(filter.try_into()?)
}

/// The program of a role, as seccompiler makes it.
pub fn program(role: ThreadRole) -> Result<BpfProgram, Box<dyn Error>> {
    let mut program = compile(rules(&allowed_syscalls(role))?, SeccompAction::Allow)?;
    for (errno, numbers) in REFUSED {
        let rules = numbers.iter().map(|number| (*number, Vec::new())).collect();
        // The last instruction is the action for unlisted calls; the next filter takes its place.
        program.pop();
        program.extend(compile(rules, SeccompAction::Errno(errno))?);
    }
    Ok(program)
}
