//! The logical units of a controller, by address, name and index.

use std::collections::HashMap;

use crate::UnitAddress;
use crate::target::Lun;
use crate::unit::Unit;

/// Up to 256 targets of 16,384 LUNs each. A unit keeps its index as long as it exists, and may lose its address before.
#[derive(Debug, Default)]
pub(crate) struct LunTable {
    /// Indexed by target, as long as the highest one that had a unit.
    targets: Vec<Target>,
    /// Indexed by unit index.
    units: Vec<Option<Box<Unit>>>,
    free: Vec<u32>,
    ids: HashMap<String, u32>,
}

/// The units of one target, ordered by LUN.
#[derive(Debug, Default)]
struct Target {
    luns: Vec<Lun>,
    unit_indices: Vec<u32>,
}

impl LunTable {
    /// The index of the unit at an address.
    pub fn find(&self, address: UnitAddress) -> Option<u32> {
        let target = self.targets.get(usize::from(address.target))?;
        let at = target.luns.binary_search(&address.lun).ok()?;
        Some(target.unit_indices[at])
    }

    /// The index of the unit with this name.
    pub fn by_id(&self, id: &str) -> Option<u32> {
        self.ids.get(id).copied()
    }

    /// LUNs of a target, ascending; `None` if the target has none.
    pub fn luns(&self, target: u8) -> Option<&[Lun]> {
        let target = self.targets.get(usize::from(target))?;
        (!target.luns.is_empty()).then_some(&target.luns)
    }

    /// Inserts a unit whose address and name are free. Returns its index.
    pub fn insert(&mut self, unit: Unit) -> u32 {
        let unit_index = self.free.pop().unwrap_or_else(|| {
            self.units.push(None);
            self.units.len() as u32 - 1
        });
        let index = usize::from(unit.address.target);
        if self.targets.len() <= index {
            self.targets.resize_with(index + 1, Target::default);
        }
        let target = &mut self.targets[index];
        let at = target.luns.partition_point(|lun| *lun < unit.address.lun);
        target.luns.insert(at, unit.address.lun);
        target.unit_indices.insert(at, unit_index);
        self.ids.insert(unit.id.clone(), unit_index);
        self.units[unit_index as usize] = Some(Box::new(unit));
        unit_index
    }

    /// Removes a unit's address.
    pub fn withdraw(&mut self, unit_index: u32) {
        let Some(address) = self.unit(unit_index).map(|unit| unit.address) else {
            return;
        };
        let Some(target) = self.targets.get_mut(usize::from(address.target)) else {
            return;
        };
        if let Some(at) = target.unit_indices.iter().position(|other| *other == unit_index) {
            target.luns.remove(at);
            target.unit_indices.remove(at);
        }
    }

    /// Removes a unit.
    pub fn remove(&mut self, unit_index: u32) -> Option<Box<Unit>> {
        self.withdraw(unit_index);
        let unit = self.units.get_mut(unit_index as usize)?.take()?;
        self.ids.remove(&unit.id);
        self.free.push(unit_index);
        Some(unit)
    }

    /// The unit with this index.
    pub fn unit(&self, unit_index: u32) -> Option<&Unit> {
        self.units.get(unit_index as usize)?.as_deref()
    }

    /// The unit with this index.
    pub fn unit_mut(&mut self, unit_index: u32) -> Option<&mut Unit> {
        self.units.get_mut(unit_index as usize)?.as_deref_mut()
    }

    /// The unit with this index, and the LUNs of its target.
    pub fn unit_with_luns(&mut self, unit_index: u32) -> Option<(&mut Unit, &[Lun])> {
        let unit = self.units.get_mut(unit_index as usize)?.as_deref_mut()?;
        let target = self.targets.get(usize::from(unit.address.target));
        Some((unit, target.map_or(&[], |target| &target.luns)))
    }

    /// All units, including those without an address.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Unit)> {
        let units = (0..).zip(&self.units);
        units.filter_map(|(unit_index, unit)| Some((unit_index, unit.as_deref()?)))
    }

    /// All units, including those without an address.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Unit)> {
        let units = (0..).zip(&mut self.units);
        units.filter_map(|(unit_index, unit)| Some((unit_index, unit.as_deref_mut()?)))
    }
}
